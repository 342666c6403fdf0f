"""Finding the iteration that a run resumes from, and loading it: RESUME.md's order, 1 to 5."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from functools import partial, reduce
from operator import or_
from typing import Any

import torch

from perdure.catalog.choose import fallback
from perdure.catalog.events import mark_damaged
from perdure.catalog.foreign import WRITERS, ForeignContent, ForeignKind, read_foreign
from perdure.catalog.read import IterationContent, ShardFiles, open_shards, read_iteration, save_tag
from perdure.catalog.root import Iteration, Root
from perdure.catalog.verify import check_data
from perdure.config.schema import CheckpointConfig
from perdure.engine.balance import read_balanced
from perdure.engine.base import Base
from perdure.engine.broadcast_json import Told
from perdure.engine.find_checkpoint import VISIBLE_S, find_checkpoint, iteration_named
from perdure.engine.laps import Laps
from perdure.engine.linked import linkable_files
from perdure.engine.live import Live
from perdure.engine.load import LoadPlan, check_config, held_names, registered_in
from perdure.engine.loaded import Loaded
from perdure.engine.own_record import from_record
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.engine.reader import ShardSource
from perdure.engine.renamed import under_old_names
from perdure.engine.saveroot import SaveRoot
from perdure.engine.streams import devices_of, join, settle
from perdure.engine.verify_on_load import compare_loaded
from perdure.errors import DamagedCheckpointError, MismatchError, few
from perdure.format.collector import collector_paused
from perdure.format.common import CommonInfo
from perdure.format.metadata import CheckpointMetadata
from perdure.format.mindformers import check_resumable
from perdure.format.names import COMMON
from perdure.format.rename import Renamed, parse_rules, rename
from perdure.state.model import parameter_names
from perdure.state.shards import is_plain
from perdure.storage.base import Directory

__all__ = ["Restore", "check_foreign"]

Say = Callable[[str], None]
# A page cache is content with fewer; a device is kept busy while others copy and digest.
READERS = 8


class Restore:
    """One load into live objects, agreed on by all ranks.

    Args:
        restore_settings: set parameter-group settings as saved.
        say: receives warnings.
        base: the weights below an adapter, loaded already.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        live: Live,
        save_root: SaveRoot,
        ranks: Ranks,
        *,
        restore_settings: bool,
        say: Any,
        base: Base | None = None,
    ) -> None:
        self._config, self._live, self._save_root, self._ranks = config, live, save_root, ranks
        self._restore_settings, self._say, self._base = restore_settings, say, base
        self._laps = Laps()

    @collector_paused()
    def run(self, checkpoint_path: str | None) -> Loaded | None:
        """What was loaded, or None for a fresh start."""
        started, self._laps = time.monotonic(), Laps()
        # State that is made here is trained on, wherever it is loaded; weights of an inference stay as they are.
        inference = any(is_plain(p) and p.is_inference() for p in self._live.model.parameters())
        with torch.inference_mode(inference):
            return self._run(checkpoint_path, started)

    def _run(self, checkpoint_path: str | None, started: float) -> Loaded | None:
        found = self._ranks.decide(
            lambda: find_checkpoint(self._config, self._save_root, checkpoint_path),
            "looking for a checkpoint",
            dict[str, Any],
        )
        if not found:
            return None
        self._laps.end("find")
        for warning in found["warnings"]:
            self._say(f"warning: {warning}")
        source = Root(found["root"], self._save_root.root.storage)
        if "kind" in found:
            loaded = self._load_foreign(source, found["path"], found["kind"], found["weights_only"])
        else:
            iteration = self._iteration(source, found["dirname"])
            loaded = self._load_or_fall_back(source, iteration, found["named"], found["weights_only"])
        if self._config.load_balanced and self._ranks.size == 1:
            loaded.notes.append("load_balanced brings nothing on one process")
        loaded.seconds, loaded.phases = time.monotonic() - started, self._laps.seconds
        return loaded

    def again(self, dirname: str) -> Loaded:
        """Loads an iteration of the run's own root in full, or the sound one that it descends from."""
        started = time.monotonic()
        root = self._save_root.root
        loaded = self._load_or_fall_back(root, self._iteration(root, dirname), named=False, weights_only=False)
        loaded.seconds = time.monotonic() - started
        return loaded

    def _iteration(self, root: Root, dirname: str) -> Iteration:
        return self._ranks.together(lambda: iteration_named(root, dirname, VISIBLE_S), "finding the checkpoint")

    def _load_or_fall_back(self, source: Root, iteration: Iteration, named: bool, weights_only: bool) -> Loaded:
        while True:
            try:
                return self._load_one(source, iteration, weights_only)
            except DamagedCheckpointError as error:
                text = error.message
                hint = f"perdure verify --read-data {iteration.path}"
                if self._ranks.is_first and self._config.enable_save:
                    with contextlib.suppress(OSError):
                        mark_damaged(self._save_root.root, iteration, text)
                if named or self._config.on_corrupt == "error":
                    raise DamagedCheckpointError(text, hint=hint, file=error.file, tensor=error.tensor) from error
                excluded = self._save_root.damaged(source) | {iteration.commit.digest}
                older = self._ranks.decide(partial(_older, source, iteration, excluded), "falling back", str)
                if not older:
                    raise DamagedCheckpointError(f"{text}; no sound earlier iteration is left", hint=hint) from error
                self._say(f"warning: {text}; going back to {older}")
                self._save_root.event("fallback", damaged=iteration.dirname, to=older, why=text)
                iteration = self._iteration(source, older)

    def _load_one(self, source: Root, iteration: Iteration, weights_only: bool) -> Loaded:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(
                self._ranks.together(lambda: source.open(iteration), "opening the checkpoint")
            )
            content = self._content(directory)
            renamed = self._renamed(content.metadata, iteration.path)
            plan = self._plan(renamed.metadata if renamed else content.metadata, iteration.path, weights_only)
            training, files = self._ranks.together(
                lambda: (from_record(content.metadata.training, iteration.path), open_shards(directory, content)),
                "opening the shards",
            )
            stack.enter_context(files)
            if renamed is not None:
                plan.fills = under_old_names(plan.fills, renamed, content.metadata)
            count = self._read(plan, files, content.metadata, (files, content))
        return Loaded(
            path=iteration.path,
            root=source.path,
            progress=Progress.from_common(content.common),
            training=training,
            weights_only=weights_only,
            sequence=content.commit.sequence,
            lineage=content.commit.lineage,
            attempt=content.commit.attempt,
            ranks=content.commit.ranks,
            model_tensors=plan.found,
            links=linkable_files(content.metadata, iteration.path, save_tag(content.commit)),
            bytes_read=count,
            notes=[*plan.notes, *self._aligned(plan, weights_only)],
        )

    def _load_foreign(self, source: Root, path: str, kind: ForeignKind, weights_only: bool) -> Loaded:
        """A checkpoint of another program: no digests to check, and nothing to fall back to."""
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(
                self._ranks.together(lambda: source.storage.open_directory(path), "opening the checkpoint")
            )
            content = self._ranks.together(lambda: read_foreign(directory, kind), "reading the metadata")
            self._ranks.together(lambda: check_foreign(content, path, weights_only), "looking at the checkpoint")
            rules = parse_rules(self._config.rename)
            renamed = self._ranks.together(lambda: rename(content.metadata, rules, path), "renaming")
            plan = self._plan(renamed.metadata, path, weights_only)
            files = stack.enter_context(ShardFiles(directory, content.metadata, None))
            plan.fills = under_old_names(plan.fills, renamed, content.metadata)
            count = self._read(plan, files, content.metadata, None)
        return Loaded(
            path=path,
            root=source.path,
            progress=Progress.from_common(content.common or CommonInfo()),
            training=content.metadata.training,
            weights_only=weights_only,
            ranks=content.ranks,
            model_tensors=plan.found,
            bytes_read=count,
            notes=[f"made by {WRITERS[kind]}", *plan.notes, *self._aligned(plan, weights_only)],
        )

    def _renamed(self, metadata: CheckpointMetadata, where: str) -> Renamed | None:
        """A checkpoint of ours under other names, where rules are given and its own are not the model's."""

        def fits() -> bool:
            wanted = [t for t in self._live.tensors() if t.name not in self._live.elsewhere()]
            return len(held_names(wanted, metadata.model)) == len(wanted)

        doing = "renaming"
        if not self._config.rename or all(self._ranks.gather(self._ranks.together(fits, doing), doing)):
            return None
        rules = parse_rules(self._config.rename)
        return self._ranks.together(lambda: rename(metadata, rules, where), doing)

    def _plan(self, metadata: CheckpointMetadata, where: str, weights_only: bool) -> LoadPlan:
        doing = "comparing checkpoint and model"
        others = self._of_others(metadata, doing)
        plan = self._ranks.together(lambda: self._plan_load(metadata, where, weights_only, others), doing)
        described, base = metadata.training.get("base"), self._base
        if described and base is not None:
            absent = frozenset().union(*self._ranks.gather(sorted(plan.absent), "comparing the base"))
            self._ranks.together(lambda: base.check(described, absent, where), "comparing the base")
        return plan

    @property
    def _balanced(self) -> bool:
        return self._config.load_balanced and self._ranks.size > 1

    def _content(self, directory: Directory) -> IterationContent:
        """The JSON files of an iteration; read by one rank for all when the load is balanced."""
        doing = "reading the metadata"
        if not self._balanced:
            return self._ranks.together(lambda: read_iteration(directory), doing)
        told = Told.read_all(directory) if self._ranks.is_first else b""
        told = self._ranks.share(told, doing)
        return self._ranks.together(lambda: read_iteration(Told(directory.path, told)), doing)

    def _read(
        self,
        plan: LoadPlan,
        source: ShardSource,
        metadata: CheckpointMetadata,
        checkable: tuple[ShardFiles, IterationContent] | None,
    ) -> int:
        """Fills everything and sets what was read; what has digests is checked whole before, if that is wished."""
        self._laps.end("plan")
        threads = max(READERS, self._config.reshard_worker_num)
        verify = self._config.verify_on_load != "off"
        devices = devices_of(piece.tensor for fill in plan.fills for piece in fill.pieces)
        settle(devices)
        if checkable is not None and self._config.verify_on_load == "first":
            self._ranks.together(lambda: self._check_share(*checkable), "checking the checkpoint")
        if self._balanced:
            count = read_balanced(source, plan.fills, metadata, self._ranks, threads=threads, verify=verify)
        else:
            count = self._ranks.together(lambda: plan.read(source, threads=threads, verify=verify), "loading")
        join(devices)
        if checkable is not None and self._config.verify_on_load == "first":
            note = compare_loaded(source, plan.fills, self._ranks, plan.where)
            plan.notes += [note] if note else []
        self._laps.end("read")
        self._ranks.together(plan.finish, "setting the loaded state")
        self._laps.end("set")
        return count

    def _check_share(self, files: ShardFiles, content: IterationContent) -> None:
        """Reads and compares this rank's share of the files: together the ranks read all."""
        share = range(self._ranks.rank, len(content.metadata.files), self._ranks.size)
        for problem in check_data(files, content, share):
            raise DamagedCheckpointError(problem.what, file=problem.file, tensor=problem.tensor)

    def _of_others(self, metadata: CheckpointMetadata, doing: str) -> frozenset[str]:
        """The checkpoint's model tensors that only other ranks hold, as in a pipeline: one bit each is exchanged."""
        if self._ranks.size == 1:
            return frozenset()
        names = sorted(metadata.model)
        mine = self._ranks.together(lambda: held_names(self._live.tensors(), metadata.model), doing)
        bits = sum(1 << number for number, name in enumerate(names) if name in mine)
        every = self._ranks.gather(bits.to_bytes(len(names) // 8 + 1, "little"), doing)
        held = reduce(or_, (int.from_bytes(each, "little") for each in every))
        return frozenset(name for number, name in enumerate(names) if held >> number & 1) - mine

    def _plan_load(
        self, metadata: CheckpointMetadata, where: str, weights_only: bool, others: frozenset[str] = frozenset()
    ) -> LoadPlan:
        check_config(self._live.model, metadata, where)
        plan = LoadPlan(where, others=others)
        self._plan_model(plan, metadata)
        if weights_only:
            return plan
        view = self._live.view()
        if view is None:
            raise MismatchError(
                f"{where} is to be resumed fully, but there is no optimizer to restore",
                hint="pass the optimizer, or take the weights only: checkpoint.no_load_optim=True",
            )
        plan.add_optimizer(view, metadata, restore_settings=self._restore_settings)
        registered = self._live.registered()
        for name, value in registered.items():
            plan.add_object(name, value, metadata, self._ranks.rank, self._ranks.size)
        unknown = sorted(set(registered_in(metadata, where)) - set(registered))
        if unknown:
            plan.notes.append(
                f"the checkpoint holds state of objects that are not registered here: {', '.join(unknown)}"
            )
        return plan

    def _plan_model(self, plan: LoadPlan, metadata: CheckpointMetadata) -> None:
        """The model's tensors; those of an adapter's base are there already."""
        tensors, base = self._live.tensors(), self._base
        described = metadata.training.get("base")
        if not isinstance(described, dict):
            plan.add_model(tensors, metadata.model, self._live.elsewhere())
            return
        if base is None:
            raise MismatchError(
                f"{plan.where} holds an adapter without the weights below it "
                f"({described.get('tensors')} tensors of {described.get('path')})",
                hint=f"name them: checkpoint.base_load_path={described.get('path')}",
            )
        plan.add_model(tensors, metadata.model, frozenset(base.sums))

    def _aligned(self, plan: LoadPlan, weights_only: bool) -> list[str]:
        """Each rank looks at its own part of the masters, so that they have to agree on what is astray."""
        return self._ranks.together(lambda: self._align_masters(plan, weights_only), "aligning the masters")

    def _align_masters(self, plan: LoadPlan, weights_only: bool) -> list[str]:
        """Masters that were not loaded take the model's values, by name; then all must round to the model."""
        reload = getattr(self._live.optimizer, "reload_main_params_from_model", None)
        if reload is None:
            return []
        optimizer, names = self._live.optimizer, parameter_names(self._live.model)

        def called(wanted: Collection[str]) -> list[Any]:
            return [p for p in optimizer.main_params() if names.get(id(p)) in set(wanted)]

        notes = []
        if weights_only or plan.optimizer is None:
            reload()
        elif missing := plan.optimizer.missing_masters:
            reload(called(missing))
            notes.append(f"{len(missing)} FP32 masters were not in the checkpoint and took the weights: {few(missing)}")
        optimizer.copy_main_params_to_model(called(plan.rounded_again))
        astray = optimizer.check_alignment()
        if astray:
            raise DamagedCheckpointError(
                f"{plan.where}: {len(astray)} FP32 masters do not round to their weights, first {astray[0]}"
            )
        return notes


def check_foreign(content: ForeignContent, where: str, weights_only: bool) -> None:
    """What a full resume needs of another program's checkpoint, before anything is compared with the model."""
    if weights_only:
        return
    if not content.metadata.optimizer:
        raise MismatchError(
            f"{where} holds no optimizer state, so it cannot be resumed fully",
            hint="to start from its weights only, set checkpoint.no_load_optim=True; a run that is to be resumed "
            "must have been saved with no_save_optim: False",
        )
    if content.common is None or content.common.position_unknown:
        lacks = f"has no {COMMON}" if content.common is None else f"has a {COMMON} without batch size and samples"
        raise MismatchError(
            f"{where} {lacks}, so it is not known where in the data its run was",
            hint="to start from its weights only, set checkpoint.no_load_optim=True; or write global_batch_size or "
            f"consumed_samples into {os.path.join(where, COMMON)}",
        )
    check_resumable(content.metadata, where)


def _older(source: Root, iteration: Iteration, excluded: set[str]) -> str:
    """Directory name of the sound iteration that this one descends from, or ""."""
    found = fallback(source, iteration, exclude=excluded)
    return "" if found is None else found.dirname
