"""A checkpoint on its way from one format to another: what it holds by name, each tensor read when its turn comes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from perdure.catalog.choose import choose, locate
from perdure.catalog.foreign import choose_foreign, read_foreign, recognise
from perdure.catalog.read import ShardFiles, read_iteration
from perdure.catalog.root import Iteration
from perdure.engine.reader import Fill, read_tensors
from perdure.engine.renamed import under_old_names
from perdure.errors import UsageError
from perdure.format.box import Box, whole
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, Section, TensorRecord
from perdure.format.mindformers import STEP
from perdure.format.rename import READY, Renamed, parse_rules, rename
from perdure.state.shards import Piece
from perdure.storage.base import Directory
from perdure.storage.local import LocalStorage

__all__ = ["Item", "State", "logical", "open_iteration", "placeholder", "staged"]

Advance = Callable[[int], None]

_SIGNS = {
    "decoder": "embed_tokens.weight",
    "huggingface": "model.embed_tokens.weight",
    "mindformers": "embedding.word_embeddings.weight",
}
"""A name by which each family of the ready maps is known."""


@dataclass(frozen=True)
class Item:
    """One tensor.

    `dtype` is the stored dtype (safetensors' name), `logical` the torch dtype it is a view of or "", `shape` in stored
    elements; `load` reads it, as stored elements on the CPU. Nothing keeps what `load` gives. `load_box` reads a part,
    where that is possible without the rest.
    """

    section: Section
    name: str
    dtype: str
    logical: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    load: Callable[[], Tensor]
    load_box: Callable[[Box], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * BY_SAFETENSORS[self.dtype].itemsize

    def part(self, box: Box) -> Tensor:
        """What lies in a box of it, in stored elements."""
        if box.shape == self.shape:
            return self.load()
        if self.load_box is not None:
            return self.load_box(box)
        return self.load()[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].clone()


@dataclass
class State:
    """What a checkpoint holds; a context that closes its files.

    `commit` and `root` are those of one of ours; `notes` are for the user.
    """

    where: str
    items: list[Item]
    training: dict[str, Any] = field(default_factory=dict)
    common: CommonInfo = field(default_factory=CommonInfo)
    commit: CommitRecord | None = None
    root: str = ""
    notes: list[str] = field(default_factory=list)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def section(self, name: Section) -> list[Item]:
        """The tensors of one section."""
        return [item for item in self.items if item.section == name]

    def __enter__(self) -> State:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.resources.close()


def open_iteration(path: str | os.PathLike[str], rules: Sequence[Any] = (), *, family: str = "") -> State:
    """An iteration of ours or of MindSpore Transformers (of a root: what a resume takes), or a Hugging Face directory.

    Args:
        rules: as `checkpoint.rename`.
        family: whose names are wanted (`huggingface` or `mindformers`): where no rules are given, a ready map is taken
            for names that are known.

    Raises:
        CheckpointNotFoundError: nothing of the kind is there.
        DamagedCheckpointError: it isn't what was written.
        UsageError: a rule cannot be meant.
    """
    resources = contextlib.ExitStack()
    try:
        directory, metadata, common, commit, root = _open(os.fspath(path), resources)
        listed = list(rules) or _usual(metadata, family)
        try:
            parsed = parse_rules(listed)
        except ValueError as error:
            raise UsageError(f"--rename: {error}") from None
        renamed = rename(metadata, parsed, directory.path)
        files = resources.enter_context(ShardFiles(directory, metadata, commit))
        files.check()
    except BaseException:
        resources.close()
        raise
    items = [_item(files, renamed, section, name, record) for section, name, record in renamed.metadata.tensors()]
    training = dict(renamed.metadata.training)
    if commit is None:
        items = _with_torch_step(items, training)
    state = State(directory.path, items, training, common, resources=resources)
    state.root = root
    state.commit = commit
    if listed and not rules:
        state.notes.append(f"names changed by the ready map {listed[0]}")
    return state


def _open(
    path: str, resources: contextlib.ExitStack
) -> tuple[Directory, CheckpointMetadata, CommonInfo, CommitRecord | None, str]:
    kind = recognise(path)
    if kind is not None:
        choice = choose_foreign(path, kind)
        directory = resources.enter_context(LocalStorage().open_directory(choice.path))
        content = read_foreign(directory, kind)
        return directory, content.metadata, content.common or CommonInfo(), None, choice.root
    located = locate(path)
    found: Iteration = located.iteration or choose(located.root).iteration
    directory = resources.enter_context(located.root.open(found))
    own = read_iteration(directory)
    return directory, own.metadata, own.common, own.commit, located.root.path


def _usual(metadata: CheckpointMetadata, family: str) -> list[str]:
    """The ready map to the names of a family, where the tensors have names that one knows."""
    for name, sign in _SIGNS.items():
        if sign in metadata.model and name != family and f"{name}-to-{family}" in READY:
            return [f"{name}-to-{family}"]
    return []


def _with_torch_step(items: list[Item], training: dict[str, Any]) -> list[Item]:
    """The step of another program's AdamW as torch counts: one float32 number; the description follows."""
    described = training.get("optimizer")
    step = next((item for item in items if (item.section, item.name) == ("optimizer", STEP)), None)
    if step is None or not isinstance(described, dict) or described["values"].get("$shared_step") != STEP:
        return items
    theirs = step.load

    def load() -> Tensor:
        return theirs().reshape(()).to(torch.float32)

    values = {"$shared_step": STEP, "$without_step": [], STEP: {"kind": "host"}}
    training["optimizer"] = {**described, "values": values}
    return [Item("optimizer", STEP, "F32", "", (), (), load) if item is step else item for item in items]


def _item(files: ShardFiles, renamed: Renamed, section: Section, name: str, record: TensorRecord) -> Item:
    def load_box(box: Box) -> Tensor:
        tensor = torch.empty(box.shape, dtype=getattr(torch, BY_SAFETENSORS[record.dtype].torch), device="cpu")
        fill = Fill(section, name, record, (Piece(box, tensor),))
        read_tensors(files, under_old_names([fill], renamed, files.metadata), threads=1)
        return tensor

    def load() -> Tensor:
        return load_box(whole(record.shape))

    return Item(section, name, record.dtype, record.logical, tuple(record.shape), record.aliases, load, load_box)


def logical(item: Item, tensor: Tensor) -> Tensor:
    """Stored elements seen as the torch dtype that they stand for."""
    if not item.logical:
        return tensor
    dtype: torch.dtype = getattr(torch, item.logical)
    return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)


def placeholder(item: Item) -> Tensor:
    """A tensor of the logical dtype and shape whose memory is never touched, and so never taken."""
    shape = item.shape[:-1] if item.logical.startswith("complex") else item.shape
    return torch.empty(shape, dtype=getattr(torch, item.logical or BY_SAFETENSORS[item.dtype].torch), device="cpu")


@contextlib.contextmanager
def staged(target: str, *, directory: bool = True) -> Iterator[str]:
    """A temporary path beside `target` that takes its name when the block ends well, and is removed otherwise.

    What earlier tries of this host left beside it when they were killed is removed first.

    Args:
        directory: what the target will be; one that exists and is empty may then be taken.

    Raises:
        UsageError: the target exists already.
    """
    full = os.path.abspath(target)
    empty = directory and os.path.isdir(full) and not os.path.islink(full) and not os.listdir(full)
    if os.path.lexists(full) and not empty:
        raise UsageError(f"{target} exists already; nothing is written over", hint="name another place, or remove it")
    head, tail = os.path.split(full)
    if not os.path.isdir(head):
        raise UsageError(f"{head} is not a directory", hint="make it first")
    stem = f".{tail}.partial-{socket.gethostname()}-"
    for name in os.listdir(head):
        if name.startswith(stem) and _is_dead(name.removeprefix(stem)):
            _remove(os.path.join(head, name))
    temporary = os.path.join(head, f"{stem}{os.getpid()}")
    try:
        yield temporary
        os.rename(temporary, full)
        LocalStorage().sync_directory(head)
    except BaseException:
        _remove(temporary)
        raise


def _is_dead(text: str) -> bool:
    """Whether `text` is the id of a process that this host no longer has."""
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        return False
    try:
        os.kill(int(text), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
