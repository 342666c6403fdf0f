"""Checkpoints that other programs made: recognised by names, chosen by our rules, read into our record.

They have no commit.json. One of MindSpore Transformers is complete when every file that its metadata names is there
with a valid header (without metadata.json: every safetensors file, a model file among them); a Hugging Face directory
when its index and its files agree. Reading only: nothing here changes a byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from perdure.catalog.read import ShardFiles, read_checked, read_header
from perdure.catalog.root import GONE, Root, TrackerReading
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError
from perdure.format import huggingface, mindformers
from perdure.format.common import HEALTHY, CommonInfo
from perdure.format.metadata import CheckpointMetadata, FileRecord
from perdure.format.names import COMMIT, COMMON, METADATA, parse_iteration_dirname, parse_shard_filename
from perdure.format.safetensors import Header
from perdure.storage.base import Directory, Storage
from perdure.storage.local import LocalStorage

__all__ = ["ForeignChoice", "ForeignContent", "ForeignKind", "choose_foreign", "read_foreign", "recognise"]

ForeignKind = Literal["mindformers", "huggingface"]

WRITERS: dict[ForeignKind, str] = {"mindformers": "MindSpore Transformers", "huggingface": "Hugging Face"}
"""What the makers are called in messages."""

_JSON_LIMIT = 1 << 20
_TABLE_LIMIT = 2 << 30
_ENDINGS = (".safetensors", ".safetensor")


class ForeignContent(NamedTuple):
    """What a foreign directory holds; `common` is None where it has none, `ranks` counts the files of a state."""

    metadata: CheckpointMetadata
    common: CommonInfo | None
    ranks: int


@dataclass(frozen=True)
class ForeignChoice:
    """The directory to load, and what the user should know about the choice.

    `named` says that the path named it itself, so that nothing else is ever taken instead.
    """

    kind: ForeignKind
    path: str
    root: str
    named: bool
    warnings: list[str] = field(default_factory=list)


def recognise(path: str, storage: Storage | None = None) -> ForeignKind | None:
    """Whose checkpoint a path is, by the names in it alone; None for ours, and for what is no checkpoint at all."""
    storage = storage or LocalStorage()
    full = os.path.abspath(path)
    if not os.path.isdir(full):
        return None
    names = storage.list(full)
    if COMMIT in names:
        return None
    if parse_iteration_dirname(os.path.basename(full)) is not None:
        theirs = METADATA in names or COMMON in names or any(n.endswith(_ENDINGS) for n in names)
        return "mindformers" if theirs else None
    if huggingface.SINGLE in names or huggingface.index_name(names) is not None:
        return "huggingface"
    iterations = [n for n in names if parse_iteration_dirname(n) is not None]
    if not iterations or any(storage.exists(os.path.join(full, n, COMMIT)) for n in iterations):
        return None
    return "mindformers" if any(storage.list(os.path.join(full, n)) for n in iterations if _is_dir(full, n)) else None


def choose_foreign(
    path: str, kind: ForeignKind, storage: Storage | None = None, *, load_healthy: bool = False
) -> ForeignChoice:
    """What a resume takes of a path that `recognise` knows: RESUME.md's rules, with "complete" for "committed".

    Args:
        load_healthy: of a root take the highest one, up to the one chosen, that is not marked abnormal.

    Raises:
        CheckpointNotFoundError: a root without a complete iteration.
        DamagedCheckpointError: the directory that the path itself names isn't complete.
    """
    full = os.path.abspath(path)
    root = Root(full, storage)
    if kind == "huggingface" or parse_iteration_dirname(os.path.basename(full)) is not None:
        with root.storage.open_directory(full) as directory:
            read_foreign(directory, kind)
        return ForeignChoice(kind, full, full if kind == "huggingface" else os.path.dirname(full), True)
    incomplete: dict[int, str] = {}
    complete: list[int] = []
    healthy: list[int] = []
    dirnames = {n: name for name in root.storage.list(full) if (n := parse_iteration_dirname(name)) is not None}
    for number, name in sorted(dirnames.items(), reverse=True):
        content = _look(root, name)
        if isinstance(content, str):
            incomplete[number] = content
            continue
        complete.append(number)
        if content.common is None or content.common.ckpt_status == HEALTHY:
            healthy.append(number)
    if not complete:
        shown = "; ".join(f"{dirnames[n]}: {why}" for n, why in list(incomplete.items())[:3])
        raise CheckpointNotFoundError(
            f"{path} looks like a root of {WRITERS[kind]}, but holds no complete iteration ({shown})",
            hint="an iteration counts when every file that its metadata names is there with a valid header",
        )
    tracker = root.tracker()
    number, warnings = _decide(tracker, complete, incomplete, dirnames)
    if load_healthy and number not in healthy:
        sound = max((n for n in healthy if n <= number), default=number)
        taking = "but no healthy one is left" if sound == number else f"taking {dirnames[sound]} (load_healthy)"
        warnings.append(f"{dirnames[number]} is marked abnormal; {taking}")
        number = sound
    return ForeignChoice(kind, root.join(dirnames[number]), full, False, warnings)


def read_foreign(directory: Directory, kind: ForeignKind) -> ForeignContent:
    """Reads an open directory: metadata, files' headers (all of them are looked at), and common.json if there.

    Raises:
        DamagedCheckpointError: a file is missing, or something isn't what it must be; it is named.
        OSError: the storage failed, which is not damage.
    """
    names = directory.names()
    if kind == "huggingface":
        return _read_huggingface(directory, names)
    if METADATA in names:
        path = os.path.join(directory.path, METADATA)
        metadata = mindformers.from_metadata(read_checked(directory, METADATA, "", _TABLE_LIMIT), path)
        if not metadata.model:
            raise DamagedCheckpointError(f"{path}: names no model file", file=path)
        with ShardFiles(directory, metadata, None) as files:
            files.check()
    else:
        metadata = mindformers.from_headers(_headers(directory, names), directory.path)
    common = None
    if COMMON in names:
        data = read_checked(directory, COMMON, "", _JSON_LIMIT)
        common = CommonInfo.decode(data, os.path.join(directory.path, COMMON))
    parsed = [p for f in metadata.files if (p := parse_shard_filename(f.name)) is not None]
    return ForeignContent(metadata, common, max((p.ranks for p in parsed), default=1))


def _read_huggingface(directory: Directory, names: list[str]) -> ForeignContent:
    index = huggingface.index_name(names)
    if huggingface.SINGLE in names or index is None:
        headers = _headers(directory, [huggingface.SINGLE])
        return ForeignContent(huggingface.from_headers(headers, directory.path), None, 1)
    path = os.path.join(directory.path, index)
    places = huggingface.weight_files(read_checked(directory, index, "", _TABLE_LIMIT), path)
    files = sorted(set(places.values()))
    metadata = huggingface.from_headers(_headers(directory, files), directory.path, places)
    return ForeignContent(metadata, None, 1)


def _headers(directory: Directory, names: list[str]) -> dict[str, Header]:
    """The headers of the safetensors files among `names`."""
    headers: dict[str, Header] = {}
    for name in sorted(n for n in names if n.endswith(_ENDINGS)):
        path = os.path.join(directory.path, name)
        try:
            reader = directory.open(name)
        except OSError as error:
            if error.errno in GONE:
                raise DamagedCheckpointError(f"{path}: missing", file=path) from None
            raise
        try:
            headers[name] = read_header(reader, FileRecord(name, 0, ""), path)[0]
        finally:
            reader.close()
    return headers


def _look(root: Root, dirname: str) -> ForeignContent | str:
    """An iteration of theirs, or why it doesn't count."""
    try:
        with root.storage.open_directory(root.join(dirname)) as directory:
            if not directory.names():
                return "empty"
            return read_foreign(directory, "mindformers")
    except DamagedCheckpointError as error:
        return error.message.removeprefix(f"{root.join(dirname)}: ").removeprefix(f"{root.join(dirname)}{os.sep}")
    except OSError as error:
        if error.errno in GONE:
            return "not a directory"
        raise


def _decide(
    tracker: TrackerReading, complete: list[int], incomplete: dict[int, str], dirnames: dict[int, str]
) -> tuple[int, list[str]]:
    """The tracker's iteration where it names a complete one, else the highest complete one, with a warning."""
    if tracker.iteration in complete:
        number = tracker.iteration
        later = [dirnames[n] for n in complete if n > number]
        if not later:
            return number, []
        names = ", ".join(later[:3])
        are = "is a complete one with a higher number" if len(later) == 1 else "are complete ones with higher numbers"
        return number, [f"the tracker names {dirnames[number]}; there {are}: {names}"]
    number = max(complete)
    if tracker.state == "missing":
        said = "there is no tracker"
    elif tracker.iteration in incomplete:
        said = f"the tracker says {tracker.text!r}, which is not complete ({incomplete[tracker.iteration]})"
    else:
        said = f"the tracker says {tracker.text!r}, which is not there"
    return number, [f"{said}; taking {dirnames[number]}, the highest that is complete"]


def _is_dir(root: str, name: str) -> bool:
    return os.path.isdir(os.path.join(root, name))
