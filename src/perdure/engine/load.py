"""One iteration into live objects: everything is found and compared first, then read, then set."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from perdure.engine.reader import Fill, ShardSource, read_tensors
from perdure.errors import DamagedCheckpointError, MismatchError, PerdureError, few
from perdure.format.dtypes import BY_TORCH
from perdure.format.metadata import CheckpointMetadata, Section, TensorRecord
from perdure.models.published import config_differences
from perdure.state.optimizer import OptimizerView
from perdure.state.optimizer_restore import OptimizerRestore, prepare_optimizer
from perdure.state.shards import NamedTensor, Piece, blank, describe, dtype_name
from perdure.state.stateful import rebuild, references

__all__ = ["LoadPlan", "check_config", "held_names", "match_model", "registered_in"]

_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class LoadPlan:
    """What a load will do; made before anything changes, so that a mismatch changes nothing.

    `notes` are lines for the user; `found` and `absent` are the model's tensors that the checkpoint has and
    lacks, `others` those of the checkpoint that only other ranks hold, `rounded_again` parameters that are to be set
    to their masters. After `read`, `finish` sets optimizer and
    registered objects.
    """

    where: str
    fills: list[Fill] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optimizer: OptimizerRestore | None = None
    objects: list[Callable[[], None]] = field(default_factory=list)
    found: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    rounded_again: list[str] = field(default_factory=list)
    others: frozenset[str] = frozenset()

    def add_model(
        self,
        tensors: Sequence[NamedTensor],
        records: Mapping[str, TensorRecord],
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        """The model's tensors, all of them but those that may come from `elsewhere`, or a `MismatchError`."""
        self.fills += match_model(tensors, records, self.where, self.notes, elsewhere, self.others)
        canonical = _canonical(records)
        self.absent = frozenset(t.name for t in tensors if not any(n in canonical for n in (t.name, *t.aliases)))
        self.found = frozenset(t.name for t in tensors) - self.absent

    def add_optimizer(self, view: OptimizerView, metadata: CheckpointMetadata, *, restore_settings: bool) -> None:
        """The optimizer's state.

        Raises:
            MismatchError: the checkpoint has none, or another optimizer's.
        """
        described = metadata.training.get("optimizer")
        if not isinstance(described, dict):
            raise MismatchError(
                f"{self.where} holds no optimizer state (it was saved with no_save_optim, or by another program)",
                hint="to start from its weights only, set checkpoint.no_load_optim=True; to be able to resume, "
                "save with checkpoint.no_save_optim=False",
            )
        restore = prepare_optimizer(
            view,
            described,
            metadata.optimizer,
            restore_settings=restore_settings,
            others=self.others,
            weights={alias: metadata.model[name] for alias, name in _canonical(metadata.model).items()},
        )
        self.optimizer = restore
        self._join_precisions(view, restore, metadata.model)
        self.notes += restore.notes
        self._add("optimizer", restore.targets, metadata.optimizer)

    def _join_precisions(
        self, view: OptimizerView, restore: OptimizerRestore, weights: Mapping[str, TensorRecord]
    ) -> None:
        """Exact values where checkpoint and run hold a parameter in different precision.

        A float32 weight is its own master, so that it fills the master of a parameter that is rounded here;
        and a master fills the parameter that is float32 here, whose rounded weight is then not read.
        """
        canonical = _canonical(weights)
        exact, again, live = [], [], dict(view.parameters())
        for name, master in view.masters.items():
            record = weights.get(canonical.get(name, ""))
            if record is None:
                continue
            if name not in restore.missing_masters:
                again += [name] if record.dtype != BY_TORCH[dtype_name(live[name].dtype)].stored else []
            elif record.dtype == "F32" and record.shape == tuple(master.shape):
                self.fills.append(Fill("model", canonical[name], record, describe("optimizer", name, master).pieces))
                restore.missing_masters.remove(name)
                exact.append(name)
        replaced = {canonical[name] for name in restore.from_masters if name in canonical}
        self.fills = [fill for fill in self.fills if fill.section != "model" or fill.name not in replaced]
        self.rounded_again = again
        lost = [
            name
            for name, parameter in live.items()
            if name not in view.masters
            and name not in restore.from_masters
            and parameter.dtype in (torch.float32, torch.float64)
            and canonical.get(name) in weights
            and weights[canonical[name]].dtype in ("BF16", "F16")
        ]
        for names, what in (
            (exact, "FP32 masters took the exact values of float32 weights"),
            (restore.from_masters, "float32 parameters took the exact values of FP32 masters"),
            (again, "parameters were rounded anew from their FP32 masters, to another dtype than before"),
            (lost, "float32 parameters come from rounded weights without FP32 masters; what rounding took is lost"),
        ):
            if names:
                self.notes.append(f"{len(names)} {what}: {few(names, 3)}")

    def add_object(self, name: str, value: Any, metadata: CheckpointMetadata, rank: int, ranks: int) -> None:
        """A registered object; one that the checkpoint lacks is reported and left as it is."""
        saved = registered_in(metadata, self.where).get(name)
        if saved is None:
            self.notes.append(
                f"`{name}` is not in the checkpoint: it starts as it was built, so the resume is not exact"
            )
            return
        trees = saved["trees"]
        if saved["mode"] == "per_rank" and len(trees) != ranks:
            merge = getattr(value, "merge_state_dicts", None)
            if merge is None:
                raise MismatchError(
                    f"`{name}` was saved once per rank by {len(trees)} ranks, and there are {ranks} now",
                    hint=f"run on {len(trees)} ranks, or give `{name}` a merge_state_dicts(states, rank, ranks)",
                )
            states = [self._state(name, tree, metadata) for tree in trees]
            self.objects.append(lambda: self._give(name, value, lambda: merge([s() for s in states], rank, ranks)))
            return
        tree = trees[rank if saved["mode"] == "per_rank" else 0]
        state = self._state(name, tree, metadata, getattr(value, "layout_of", None))
        self.objects.append(lambda: self._give(name, value, state))

    def _give(self, name: str, value: Any, state: Callable[[], Any]) -> None:
        """Hands an object its state; an error of its own code is told with whose it is."""
        try:
            value.load_state_dict(state())
        except PerdureError:
            raise
        except Exception as error:
            raise MismatchError(
                f"{self.where}: `{name}` does not take the state that was saved under its name: "
                f"{type(error).__name__}: {str(error)[:300]}"
            ) from error

    def _state(
        self,
        name: str,
        tree: Any,
        metadata: CheckpointMetadata,
        layout_of: Callable[[str], Tensor | None] | None = None,
    ) -> Callable[[], Any]:
        tensors: dict[str, Tensor] = {}
        for reference in references(tree):
            record = metadata.extra.get(reference)
            if record is None:
                raise DamagedCheckpointError(f"{self.where}: extra: {reference}: named by `{name}`, but not there")
            like = layout_of(reference.removeprefix(f"{name}.")) if layout_of is not None else None
            alike = like is not None and describe("extra", reference, like).shape == tuple(record.shape)
            tensors[reference] = torch.zeros_like(like) if like is not None and alike else blank(record)
        self._add("extra", [describe("extra", key, t) for key, t in tensors.items()], metadata.extra)
        return lambda: rebuild(tree, lambda reference: tensors[reference], name)

    def _add(self, section: Section, tensors: Sequence[NamedTensor], records: Mapping[str, TensorRecord]) -> None:
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for tensor in tensors:
            pieces[tensor.name].extend(tensor.pieces)
        self.fills += [Fill(section, name, records[name], tuple(held)) for name, held in pieces.items()]

    def read(
        self, source: ShardSource, *, threads: int, verify: bool, progress: Callable[[int], None] | None = None
    ) -> int:
        """Fills all tensors; returns the bytes read."""
        return read_tensors(source, self.fills, threads=threads, verify=verify, progress=progress)

    def finish(self) -> None:
        """Sets what was read aside: optimizer state, then the registered objects."""
        if self.optimizer is not None:
            self.optimizer.install()
        for load in self.objects:
            load()


def registered_in(metadata: CheckpointMetadata, where: str) -> dict[str, Any]:
    """What the checkpoint says of registered objects, by name: `mode`, and a tree for each rank or one for all.

    Raises:
        DamagedCheckpointError: it isn't what a save writes.
    """
    found = metadata.training.get("extra", {})
    for name, saved in found.items() if isinstance(found, dict) else [("", None)]:
        known = isinstance(saved, dict) and saved.get("mode") in ("replicated", "per_rank")
        trees = saved.get("trees") if known and saved is not None else None
        if not isinstance(trees, list) or not trees:
            raise DamagedCheckpointError(f"{where}: training.extra: {name[:300]}: not what a save writes")
    return dict(found)


def check_config(model: nn.Module, metadata: CheckpointMetadata, where: str) -> None:
    """Compares the model with the config.json that came with published weights.

    Raises:
        MismatchError: the two compute differently; each key is told with both values.
    """
    config = metadata.training.get("config")
    found = config_differences(model, config) if isinstance(config, dict) else []
    if found:
        lines = [f"  {key}: {theirs!r} in config.json, {ours!r} in the model" for key, theirs, ours in found[:10]]
        more = [f"  and {len(found) - 10} more"] if len(found) > 10 else []
        key, theirs, _ = found[0]
        raise MismatchError(
            "\n".join([f"{where}: its config.json is not that of the model; nothing was loaded", *lines, *more]),
            hint=f"set model.{key}={theirs}" if len(found) == 1 else "give the model section the values of config.json",
        )


def match_model(
    tensors: Sequence[NamedTensor],
    records: Mapping[str, TensorRecord],
    where: str,
    notes: list[str],
    elsewhere: frozenset[str] = frozenset(),
    others: frozenset[str] = frozenset(),
) -> list[Fill]:
    """Pairs live tensors with the checkpoint's, by name or alias; those of `elsewhere` may lack there, those of
    `others` here.

    Raises:
        MismatchError: short: counts, the first names, both shapes, the likely cause.
    """
    canonical = _canonical(records)
    fills, missing, shapes, cast = [], [], [], []
    used: set[str] = set()
    for tensor in tensors:
        found = [canonical[n] for n in (tensor.name, *tensor.aliases) if n in canonical]
        if not found:
            if tensor.name not in elsewhere:
                missing.append(tensor.name)
            continue
        if len(set(found)) > 1:
            raise MismatchError(
                f"{where} holds {few(sorted(set(found)))} as separate tensors, which the model ties to one",
                hint="build the model with the same tying (for the decoder: model.tie_word_embeddings)",
            )
        record = records[found[0]]
        used.add(found[0])
        if tuple(record.shape) != tensor.shape or record.logical != tensor.logical:
            shapes.append((tensor, record))
            continue
        if record.dtype != tensor.dtype:
            if record.dtype not in _FLOATS or tensor.dtype not in _FLOATS:
                shapes.append((tensor, record))
                continue
            cast.append(f"{tensor.name} {record.dtype} -> {tensor.dtype}")
        fills.append(Fill("model", found[0], record, tensor.pieces))
    unexpected = sorted(set(records) - used - others)
    if missing or unexpected or shapes:
        raise _mismatch(where, missing, unexpected, shapes)
    if cast:
        notes.append(f"{len(cast)} tensors were converted: {few(cast)}")
    return fills


def held_names(tensors: Sequence[NamedTensor], records: Mapping[str, TensorRecord]) -> set[str]:
    """The checkpoint's tensors that are among these, by name or alias."""
    canonical = _canonical(records)
    return {canonical[n] for tensor in tensors for n in (tensor.name, *tensor.aliases) if n in canonical}


def _canonical(records: Mapping[str, TensorRecord]) -> dict[str, str]:
    """Every name of every tensor -> the name of its record."""
    return {alias: name for name, record in records.items() for alias in (name, *record.aliases)}


def _mismatch(
    where: str, missing: list[str], unexpected: list[str], shapes: list[tuple[NamedTensor, TensorRecord]]
) -> MismatchError:
    lines = [f"{where} does not fit the model; nothing was loaded"]
    if missing:
        lines.append(f"  {len(missing)} tensors of the model are not in the checkpoint: {few(missing)}")
    if unexpected:
        lines.append(f"  {len(unexpected)} tensors of the checkpoint are not in the model: {few(unexpected)}")
    for tensor, record in shapes[:5]:
        lines.append(
            f"  {tensor.name}: {record.dtype} {list(record.shape)} in the checkpoint, "
            f"{tensor.dtype} {list(tensor.shape)} in the model"
        )
    if len(shapes) > 5:
        lines.append(f"  and {len(shapes) - 5} more of another shape or dtype")
    return MismatchError("\n".join(lines), hint=_cause(missing, unexpected, shapes))


def _cause(missing: list[str], unexpected: list[str], shapes: list[tuple[NamedTensor, TensorRecord]]) -> str:
    prefixes = _renamed_prefix(missing, unexpected)
    if prefixes is not None:
        return (
            f"names differ by a prefix: {prefixes[1]!r} in the checkpoint, {prefixes[0]!r} in the model; "
            "checkpoint.rename maps names"
        )
    if any(r.dtype.startswith("F8_") and t.dtype in _FLOATS for t, r in shapes):
        return "the checkpoint holds quantised weights, whose scales are not applied here: dequantise them first"
    if shapes and not missing and not unexpected:
        if all(t.shape == tuple(r.shape) for t, r in shapes):
            return "only floating-point numbers are converted: give the model the dtypes that were saved"
        sizes = {prod(t.shape) - prod(r.shape) for t, r in shapes}
        larger = "larger" if min(sizes) > 0 else "smaller" if max(sizes) < 0 else "other"
        return f"the model has {larger} sizes than the one saved: compare the model section of both configurations"
    if missing and not unexpected and all("lora_" in name for name in missing):
        return (
            "these are weights without the adapter: to start one over them, name them as checkpoint.base_load_path "
            "and leave load_path empty"
        )
    if missing and not unexpected:
        return "the model has more layers or modules than the one saved"
    if unexpected and not missing:
        return "the model has fewer layers or modules than the one saved"
    return "the checkpoint is of another model: `perdure inspect` lists its tensors"


def _renamed_prefix(missing: list[str], unexpected: list[str]) -> tuple[str, str] | None:
    """(prefix in the model, prefix in the checkpoint) that turns one list of names into the other."""
    if not missing or len(missing) != len(unexpected):
        return None
    a, b = sorted(missing)[0], sorted(unexpected)[0]
    tail = 0
    while tail < min(len(a), len(b)) and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    here, there = a[: len(a) - tail], b[: len(b) - tail]
    renamed = {there + n[len(here) :] for n in missing if n.startswith(here)}
    return (here, there) if renamed == set(unexpected) else None
