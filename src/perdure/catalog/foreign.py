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

__all__ = [
    "WRITERS",
    "ForeignChoice",
    "ForeignContent",
    "ForeignEntry",
    "ForeignKind",
    "ForeignListing",
    "choose_foreign",
    "list_foreign",
    "read_foreign",
    "recognise",
]

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
class ForeignEntry:
    """A directory of a foreign root; `content` is None for one that isn't complete, and `why` says why not.

    `iteration` is the number in its name; None for a directory of weights, which has none.
    """

    dirname: str
    iteration: int | None
    content: ForeignContent | None
    why: str = ""


@dataclass(frozen=True)
class ForeignListing:
    """One look at a foreign path: its root (a directory of weights is its own), what it holds, what the tracker says.

    Entries ascend by number; there is no other order that their files tell.
    """

    kind: ForeignKind
    root: str
    entries: list[ForeignEntry]
    tracker: TrackerReading

    @property
    def complete(self) -> dict[int, ForeignEntry]:
        """The complete iterations by number."""
        return {e.iteration: e for e in self.entries if e.content is not None and e.iteration is not None}


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
        return "mindformers" if theirs and not _is_ours(storage, full, names) else None
    if huggingface.SINGLE in names or huggingface.index_name(names) is not None:
        return "huggingface"
    iterations = [n for n in names if parse_iteration_dirname(n) is not None]
    if not iterations or any(storage.exists(os.path.join(full, n, COMMIT)) for n in iterations):
        return None
    held = {path: storage.list(path) for n in iterations if _is_dir(full, n) for path in [os.path.join(full, n)]}
    theirs = any(held.values()) and not any(_is_ours(storage, path, inside) for path, inside in held.items())
    return "mindformers" if theirs else None


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
    listing = list_foreign(full, kind, storage)
    dirnames = {e.iteration: e.dirname for e in listing.entries if e.iteration is not None}
    incomplete = {e.iteration: e.why for e in listing.entries if e.content is None and e.iteration is not None}
    complete = listing.complete
    if not complete:
        shown = "; ".join(f"{dirnames[n]}: {why}" for n, why in sorted(incomplete.items(), reverse=True)[:3])
        raise CheckpointNotFoundError(
            f"{path} looks like a root of {WRITERS[kind]}, but holds no complete iteration ({shown})",
            hint="an iteration counts when every file that its metadata names is there with a valid header",
        )
    number, warnings = _decide(listing.tracker, list(complete), incomplete, dirnames)
    healthy = [n for n, entry in complete.items() if _is_healthy(entry)]
    if load_healthy and number not in healthy:
        sound = max((n for n in healthy if n <= number), default=number)
        taking = "but no healthy one is left" if sound == number else f"taking {dirnames[sound]} (load_healthy)"
        warnings.append(f"{dirnames[number]} is marked abnormal; {taking}")
        number = sound
    return ForeignChoice(kind, root.join(dirnames[number]), full, False, warnings)


def list_foreign(path: str, kind: ForeignKind, storage: Storage | None = None) -> ForeignListing:
    """Everything under a path that `recognise` knows: the iterations of a root, or the one directory it is.

    Raises:
        OSError: the storage failed, which is not damage.
    """
    full = os.path.abspath(path)
    number = parse_iteration_dirname(os.path.basename(full))
    if kind == "huggingface" or number is not None:
        above = Root(os.path.dirname(full), storage)
        entry = _look(above, os.path.basename(full), number, kind)
        tracker = above.tracker() if number is not None else TrackerReading("", None, "missing")
        return ForeignListing(kind, full if kind == "huggingface" else above.path, [entry], tracker)
    root = Root(full, storage)
    numbered = {n: name for name in root.storage.list(full) if (n := parse_iteration_dirname(name)) is not None}
    entries = [_look(root, name, n, kind) for n, name in sorted(numbered.items())]
    return ForeignListing(kind, root.path, entries, root.tracker())


def read_foreign(directory: Directory, kind: ForeignKind) -> ForeignContent:
    """Reads an open directory: metadata, files' headers (all of them are looked at), and common.json if there.

    The record's files have the sizes that were found.

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
            sizes = {f.name: files.size(index) for index, f in enumerate(metadata.files)}
            _refuse_ours(directory, {f.name: files.header(index) for index, f in enumerate(metadata.files)})
    else:
        headers, sizes = _headers(directory, names)
        _refuse_ours(directory, headers)
        metadata = mindformers.from_headers(headers, directory.path)
    _set_sizes(metadata, sizes)
    common = None
    if COMMON in names:
        data = read_checked(directory, COMMON, "", _JSON_LIMIT)
        common = CommonInfo.decode(data, os.path.join(directory.path, COMMON))
    parsed = [p for f in metadata.files if (p := parse_shard_filename(f.name)) is not None]
    return ForeignContent(metadata, common, max((p.ranks for p in parsed), default=1))


def _read_huggingface(directory: Directory, names: list[str]) -> ForeignContent:
    index = huggingface.index_name(names)
    places: dict[str, str] | None = None
    files = [huggingface.SINGLE]
    if huggingface.SINGLE not in names and index is not None:
        path = os.path.join(directory.path, index)
        places = huggingface.weight_files(read_checked(directory, index, "", _TABLE_LIMIT), path)
        files = sorted(set(places.values()))
    headers, sizes = _headers(directory, files)
    metadata = huggingface.from_headers(headers, directory.path, places)
    if huggingface.CONFIG in names:
        data = read_checked(directory, huggingface.CONFIG, "", _JSON_LIMIT)
        metadata.training["config"] = huggingface.model_config(data, os.path.join(directory.path, huggingface.CONFIG))
    _set_sizes(metadata, sizes)
    return ForeignContent(metadata, None, 1)


def _headers(directory: Directory, names: list[str]) -> tuple[dict[str, Header], dict[str, int]]:
    """The headers of the safetensors files among `names`, and the files' sizes."""
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
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
            sizes[name] = reader.size
        finally:
            reader.close()
    return headers, sizes


def _is_ours(storage: Storage, path: str, names: list[str]) -> bool:
    """Whether a directory without commit.json was written by us all the same: our shards carry their save's mark."""
    try:
        with storage.open_directory(path) as directory:
            headers, _ = _headers(directory, names)
    except (DamagedCheckpointError, OSError):
        return False
    return any("save" in header.text for header in headers.values())


def _refuse_ours(directory: Directory, headers: dict[str, Header]) -> None:
    """Without our commit nothing could be checked: what was damaged would be believed."""
    for name, header in headers.items():
        if "save" in header.text:
            path = os.path.join(directory.path, COMMIT)
            raise DamagedCheckpointError(f"{path}: missing, and {name} was written by perdure", file=path)


def _set_sizes(metadata: CheckpointMetadata, sizes: dict[str, int]) -> None:
    metadata.files = [FileRecord(f.name, sizes[f.name], f.header) for f in metadata.files]


def _look(root: Root, dirname: str, number: int | None, kind: ForeignKind) -> ForeignEntry:
    """A directory of theirs, or why it doesn't count."""
    path = root.join(dirname)
    try:
        with root.storage.open_directory(path) as directory:
            if not directory.names():
                return ForeignEntry(dirname, number, None, "empty")
            return ForeignEntry(dirname, number, read_foreign(directory, kind))
    except DamagedCheckpointError as error:
        why = error.message.removeprefix(f"{path}: ").removeprefix(f"{path}{os.sep}")
        return ForeignEntry(dirname, number, None, why)
    except OSError as error:
        if error.errno in GONE:
            return ForeignEntry(dirname, number, None, "not a directory")
        raise


def _is_healthy(entry: ForeignEntry) -> bool:
    return entry.content is None or entry.content.common is None or entry.content.common.ckpt_status == HEALTHY


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
