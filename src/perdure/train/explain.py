"""What a start with a configuration would do, told without doing it: nothing is written, no lock is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from perdure.catalog.root import GONE
from perdure.config.ranks import RankLayout, check_ranks
from perdure.config.schema import TrainConfig
from perdure.errors import PerdureError
from perdure.format.metadata import SECTIONS, CheckpointMetadata
from perdure.optim.schedules import build_schedule
from perdure.parallel.mesh import Mesh
from perdure.storage.local import LocalStorage
from perdure.train import build
from perdure.train.candidate import Candidate, find_candidate, save_target
from perdure.train.feed import feed, place
from perdure.train.forecast import forecast
from perdure.train.resume import Wish, changed_settings, rate_warning, resume_point
from perdure.train.rollback import LeftOut
from perdure.train.state import TrainerState

__all__ = ["Explanation", "explain"]

_T = TypeVar("_T")


@dataclass
class Explanation:
    """What a start would do; what could not be found out is None, empty or "".

    Attributes:
        start: `resume`, `weights only` or `fresh`; "" where something stands in the way of telling.
        source, made_by: the checkpoint that is loaded, and the program that wrote it.
        why: why this one, and no newer one.
        not_counted: what lies beside it and is no candidate, as (name, reason).
        saved: step, consumed samples and global batch size of the checkpoint, and the ranks that saved it.
        step: optimizer steps done when training goes on; `steps` is the target.
        arithmetic: how step and position were found, where that needed any.
        next_samples: stream positions [first, last) of the next step.
        epoch, step_in_epoch: of the next step.
        rate_before, rate: learning rates that this configuration gives for the last step done and for the next one.
        changes: settings that differ from the checkpoint's, as `key: old -> new`.
        layout_before, layout: how many ranks, and how they share the work.
        held, reads: bytes of weights that each rank holds, and bytes that it reads; of many ranks, the first ones.
        stored: bytes of tensors in the checkpoint.
        save_path, save_bytes, save_max, free: where saves go, what one takes, how many are kept, what is free there.
        notes: what the load would say besides.
        warnings: what the user can act on.
        problems: why the start would fail; the first one is what it would say.
    """

    start: Literal["resume", "weights only", "fresh", ""] = ""
    source: str = ""
    made_by: str = ""
    why: str = ""
    not_counted: list[tuple[str, str]] = field(default_factory=list)
    saved: dict[str, int] | None = None
    step: int | None = None
    steps: int = 0
    arithmetic: list[str] = field(default_factory=list)
    next_samples: tuple[int, int] | None = None
    epoch: int | None = None
    step_in_epoch: int | None = None
    rate_before: float | None = None
    rate: float | None = None
    changes: list[str] = field(default_factory=list)
    layout_before: dict[str, int] | None = None
    layout: dict[str, int] | None = None
    held: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    stored: int | None = None
    save_path: str = ""
    save_bytes: int | None = None
    save_max: int = 0
    free: int | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[PerdureError] = field(default_factory=list)

    def attempt(self, work: Callable[[], _T]) -> _T | None:
        """What `work` gives; None, and a problem more, where it fails."""
        try:
            return work()
        except PerdureError as error:
            self.problems.append(error)
            return None


def explain(config: TrainConfig, ranks: int | None = None) -> Explanation:
    """Goes through a start of `config`, and gathers what would fail instead of ending there.

    Args:
        ranks: of the job; None: as many as saved the checkpoint, else 1.
    """
    told = Explanation(steps=config.training.steps)
    target = save_target(config)
    candidate = told.attempt(lambda: find_candidate(config, target))
    if candidate is not None:
        _tell_candidate(candidate, told)
    elif not told.problems:
        told.start = "fresh"
        told.why = "nothing is committed yet" if config.checkpoint.auto_resume else "checkpoint.load_path is empty"
        told.not_counted = [(entry.name, entry.why) for entry in target.root.root.uncommitted()]
    ranks = ranks or (candidate.ranks if candidate is not None else 1)
    layout = told.attempt(lambda: check_ranks(config, ranks))
    dataset = told.attempt(lambda: build.data(config, None))
    told.attempt(lambda: config.require(eval_dataset=config.training.eval_interleaved_steps > 0))
    if layout is not None:
        told.layout = {"ranks": layout.ranks, **layout.degrees}
    if dataset is not None and told.start:
        told.attempt(lambda: _tell_position(config, candidate, dataset, told))
    if dataset is not None and layout is not None:
        told.attempt(lambda: _tell_ranks(config, candidate, layout, dataset, told))
    if config.checkpoint.base_load_path:
        told.notes.append(f"the weights below the adapter are read besides, from {config.checkpoint.base_load_path}")
    if config.checkpoint.enable_save:
        _tell_room(config, target.root.root.path, candidate, told)
    return told


def _tell_candidate(candidate: Candidate, told: Explanation) -> None:
    told.start = "weights only" if candidate.weights_only else "resume"
    told.source, told.made_by = candidate.path, candidate.made_by
    told.why, told.not_counted, told.warnings = candidate.why, candidate.not_counted, list(candidate.warnings)
    told.saved = {
        "step": candidate.progress.global_step,
        "consumed_samples": candidate.progress.consumed_samples,
        "global_batch_size": candidate.progress.global_batch_size,
        "ranks": candidate.ranks,
    }
    mesh = candidate.training.get("mesh")
    told.layout_before = {"ranks": candidate.ranks, **(mesh if isinstance(mesh, dict) else {})}
    told.stored = _stored(candidate.metadata, weights_only=False)


def _tell_position(config: TrainConfig, candidate: Candidate | None, dataset: Any, told: Explanation) -> None:
    """Step, samples and learning rates, by the functions that a start uses."""
    loader = feed(config, dataset, Mesh())
    state, size = TrainerState(steps=config.training.steps), config.training.global_batch_size
    schedule = build_schedule(config.lr_scheduler, config.training.steps)

    def rate(step: int, samples: int, batch: int) -> float:
        return schedule.rate(global_step=step, consumed_samples=samples, global_batch_size=batch)

    if candidate is not None and not candidate.weights_only:
        point = resume_point(candidate.progress, candidate.training, Wish.of(config), loader.identity())
        state.global_step, state.consumed_samples = point.global_step, point.consumed_samples
        told.arithmetic, told.warnings = point.notes, told.warnings + point.warnings
        left_out = LeftOut() if point.data_afresh else LeftOut.of(candidate.training)
        loader.leave_out(left_out.ranges)
        place(loader, point)
        warning = rate_warning(candidate.training.get("settings", {}), rate, state, size)
        told.warnings += [warning] if warning else []
    idle = build.idle_warning(config, rate)
    told.warnings += [idle] if idle else []
    coming = loader.plan.step_range(state.consumed_samples)
    told.step, told.next_samples = state.global_step, (coming.first, coming.last)
    told.epoch, told.step_in_epoch = loader.counters
    told.rate = rate(state.global_step, state.consumed_samples, coming.global_batch_size)
    if state.global_step:
        before = max(0, state.consumed_samples - coming.global_batch_size)
        told.rate_before = rate(state.global_step - 1, before, coming.global_batch_size)


def _tell_ranks(
    config: TrainConfig, candidate: Candidate | None, layout: RankLayout, dataset: Any, told: Explanation
) -> None:
    metadata = candidate.metadata if candidate is not None else None
    weights_only = candidate is not None and candidate.weights_only
    found = forecast(config, layout, dataset, metadata, told.source, weights_only=weights_only)
    told.held, told.reads, told.notes = found.held, found.reads, found.notes
    if candidate is not None and not candidate.weights_only:
        told.changes = changed_settings(candidate.training.get("settings", {}), found.settings)


def _tell_room(config: TrainConfig, path: str, candidate: Candidate | None, told: Explanation) -> None:
    told.save_path, told.save_max = path, config.checkpoint.save_max
    if candidate is not None and (candidate.metadata.optimizer or config.checkpoint.no_save_optim):
        told.save_bytes = _stored(candidate.metadata, weights_only=config.checkpoint.no_save_optim)
    there = os.path.abspath(path)
    while not os.path.isdir(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    try:
        told.free = LocalStorage().free_bytes(there)
    except OSError as error:
        if error.errno not in GONE:
            told.warnings.append(f"{there}: what is free there cannot be told: {error.strerror}")
    if told.free is not None and told.save_bytes is not None and told.free < told.save_bytes:
        told.warnings.append(f"a save takes {told.save_bytes} bytes below {path}, where {told.free} are free")


def _stored(metadata: CheckpointMetadata, *, weights_only: bool) -> int:
    """Bytes of the tensors, each counted once."""
    sections = [part for part in SECTIONS if not (weights_only and part == "optimizer")]
    return sum(tensor.nbytes for part in sections for tensor in metadata.section(part).values())
