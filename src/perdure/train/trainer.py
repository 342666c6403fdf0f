"""A run, from one configuration: build, resume, train, save. Read it from `train` downward."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from perdure.config.load import dump_config
from perdure.config.schema import TrainConfig
from perdure.data.loader import StepBatch
from perdure.engine.checkpointer import Checkpointer, Loaded
from perdure.engine.laps import Laps, process_age
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.engine.same_weights import take_the_first_ones
from perdure.errors import TrainingError, UsageError
from perdure.parallel.apply import parallelize
from perdure.parallel.mesh import make_mesh
from perdure.state.random import seed_all
from perdure.train import build
from perdure.train.callbacks.base import Callback, call_hooks
from perdure.train.console import Console
from perdure.train.feed import feed, place
from perdure.train.given import check_given, registered
from perdure.train.health import HealthMonitor, Verdict
from perdure.train.logbook import Logbook, header_of
from perdure.train.resume import Wish, changed_settings, rate_warning, resume_point, understood
from perdure.train.rollback import LeftOut
from perdure.train.state import TrainerState
from perdure.train.step import LossFunction, TrainStep, next_token_loss
from perdure.train.stop import Stopped, StopRequest, listen

__all__ = ["Trainer"]


class Trainer:
    """Trains what one YAML file describes; the same call, or the same command, resumes.

    Args:
        config: a path, a mapping, or a `TrainConfig`.
        model: an `nn.Module` in place of the `model` section.
        optimizer: an optimizer over its parameters, in place of the `optimizer` section; its groups keep
            the ratios of their rates.
        train_dataset: a map-style dataset in place of `train_dataset.dataloader`, or one to iterate over with
            `state_dict` and `load_state_dict`.
        eval_dataset: likewise in place of `eval_dataset`, for `training.eval_interleaved_steps`.
        compute_loss_func: `f(model, batch)` gives (sum, count), or the mean loss over a micro-batch.
        callbacks: further callbacks, after the configured ones.
        extra: registered objects, saved and restored with the run.

    Raises:
        UsageError: what was passed, or the configuration (ConfigError, with all faults at once), cannot be meant.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        compute_loss_func: LossFunction | None = None,
        callbacks: Sequence[Callback] = (),
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = build.configuration(config)
        check_given(model, optimizer, callbacks)
        self.model, self.optimizer, self.train_dataset = model, optimizer, train_dataset
        self.eval_dataset = eval_dataset
        self.state, self._begun, self._owes_evaluation = TrainerState(), False, False
        self._loss = compute_loss_func or next_token_loss
        self._callbacks, self._extra = list(callbacks), dict(extra or {})

    def train(self, checkpoint_path: str | None = None) -> TrainerState:
        """Trains until `training.steps`, or until a signal asks to stop; resumes first where there is something to.

        Args:
            checkpoint_path: a root or iteration to load, instead of `checkpoint.load_path`.

        Returns:
            The run's last state; `state.stop_signal` says whether a signal ended it.

        Raises:
            PerdureError: with one sentence and a hint; checkpoints committed before are untouched.
        """
        if self._begun:
            raise UsageError("this Trainer has trained already", hint="make another: it resumes where this one ended")
        self._begun = True
        self._laps = Laps(process_age())
        self._laps.end("start")
        self.ranks, state = Ranks(), self.state
        try:
            with listen() as stop, contextlib.ExitStack() as stack, self.ranks.as_one():
                self._build(stack)
                self._laps.end("build")
                self._resume(checkpoint_path)
                if state.finished:
                    self.console.say(f"nothing to do: step {state.global_step} of {state.steps} is reached")
                    return state
                self.ranks.together(self._open_histories, "opening the histories")
                self._hook("on_train_begin")
                self.console.begin(state.global_step)
                self._run(stop)
                self._finish(stop)
        except Stopped as stopped:
            state.stop_signal = stopped.signal
        return state

    # ---- building

    def _build(self, stack: contextlib.ExitStack) -> None:
        config, training = self.config, self.config.training
        self.console = Console(self.ranks.is_first)
        stack.callback(self.console.end)
        self.device = build.device(training.deterministic)
        self._layout = build.layout(config, self.ranks)
        self.mesh = make_mesh(self._layout, self.device)
        torch.use_deterministic_algorithms(training.deterministic)
        seed_all(training.seed)
        self.train_dataset = build.data(config, self.train_dataset)
        compute = build.policy_dtype(config, self.model, self.mesh)
        network = build.network(config, self.model, self.train_dataset, self.ranks, policy=compute is not None)
        self._differed = take_the_first_ones(network, self.ranks)
        self.scaler = build.loss_scaler(config, network)
        self._parallel = parallelize(network, self.mesh, self.device, config, compute)
        self.model = self._parallel.model
        self.optimizer, self._rate = build.optimizer_and_schedule(
            config, self.model, self.optimizer, self.mesh, self.console.say
        )
        loader = feed(config, self.train_dataset, self.mesh, self.ranks, self.console.say)
        self.loader = stack.enter_context(loader)
        self._left_out = LeftOut()
        self._moved: dict[str, Any] = {}
        self.health = HealthMonitor(config.monitor.health_checkpoint)
        self._evaluation = build.evaluation(
            config, self.eval_dataset, self._loss, self.ranks, self.mesh, self.device, self.console.say
        )
        if self._evaluation is not None:
            stack.callback(self._evaluation.close)
        self._callbacks = build.callbacks(config, self._callbacks)
        self._settings = build.settings_of(config, self.optimizer)
        self._logbook = Logbook(config.output_dir, writes=self.ranks.is_first, say=self.console.say)
        # Closed after the checkpointer, which waits for a save whose commit vouches for the ledger.
        stack.callback(self._logbook.close)
        self.checkpointer = stack.enter_context(
            Checkpointer(
                config.checkpoint,
                model=self.model,
                optimizer=self.optimizer,
                extra=registered(self._extra, self._callbacks, self.loader),
                training=self._training_record,
                restore_settings=False,
                tell_loads=False,
                ranks=self.ranks,
                default_path=os.path.join(config.output_dir, "checkpoint"),
                before_commit=self._logbook.sync,
                say=self.console.say,
            )
        )
        self._run_step = TrainStep(
            self._parallel,
            self.optimizer,
            loss=self._loss,
            ranks=self.ranks,
            mesh=self.mesh,
            device=self.device,
            scaler=self.scaler,
            seed=training.seed,
            max_norm=training.max_norm,
            skip_non_finite=training.use_skip_step_on_nan,
            health=self.health,
        )
        self._hook("on_build")

    # ---- resuming

    def _resume(self, checkpoint_path: str | None) -> None:
        """Loads what there is to load, and goes on from there."""
        state, training = self.state, self.config.training
        saved = self.checkpointer.load(checkpoint_path)
        loaded = self.checkpointer.loaded
        self._laps.end("agree", loaded.phases if loaded is not None else None)
        state.steps, state.attempt = training.steps, self.checkpointer.attempt
        state.global_batch_size, state.stretches = training.global_batch_size, self.loader.stretches
        if loaded is not None:
            self._go_on_from(loaded, saved)
        elif self._differed:
            self.console.say(self._differed)

    def _go_on_from(self, loaded: Loaded, saved: Progress) -> None:
        """Puts state, data, health and loss scale where the checkpoint left them, and says so."""
        state = self.state
        notes: list[str] = []
        if not loaded.weights_only:
            with understood(loaded.path):
                point = resume_point(saved, loaded.training, Wish.of(self.config), self.loader.identity())
                state.skipped_steps, state.consecutive_skipped_steps = loaded.training.get("skipped_steps", (0, 0))
                self.health.load_state_dict(loaded.training.get("health", {}))
                self._owes_evaluation = bool(loaded.training.get("owes_evaluation"))
                left_out = LeftOut() if point.data_afresh else LeftOut.of(loaded.training)
            state.global_step, state.consumed_samples = point.global_step, point.consumed_samples
            self._leave_out(left_out)
            self._moved = point.moved
            place(self.loader, point)
            state.stretches = self.loader.stretches
            self.scaler.load_state_dict(
                {"scale": saved.loss_scale, "good_steps": loaded.training.get("loss_scale_good_steps", 0)}
            )
            state.loss_scale = self.scaler.scale
            notes += point.notes
            if point.notes:
                self.checkpointer.note("resume", step=state.global_step, notes=point.notes)
            for warning in point.warnings:
                self.console.say(f"warning: {warning}")
            settings = loaded.training.get("settings", {})
            for change in changed_settings(settings, self._settings):
                self.console.say(f"changed since the checkpoint: {change}")
            if warning := rate_warning(settings, self._rate, state, self.config.training.global_batch_size):
                self.console.say(f"warning: {warning}")
            if loaded.ranks != self.ranks.size:
                notes.append(f"saved by {loaded.ranks} rank{'s' * (loaded.ranks != 1)}, loaded by {self.ranks.size}")
        at = f"step {state.global_step}, sample {state.consumed_samples}, epoch {state.epoch_num}"
        self.console.say(loaded.told(at, notes, str(self._laps)))

    def _training_record(self) -> dict[str, Any]:
        """What metadata.json keeps for a resume to compare."""
        return {
            "seed": self.config.training.seed,
            "mesh": self._layout.degrees,
            "datasets": {"train": self.loader.identity()},
            "shuffle": self.config.train_dataset.dataloader.shuffle,
            "settings": self._settings,
            "applied": Wish.of(self.config).one_shot,
            "loss_scale_good_steps": self.scaler.good_steps,
            "health": self.health.state_dict(),
            "skipped_steps": [self.state.skipped_steps, self.state.consecutive_skipped_steps],
            "owes_evaluation": bool(self.state.stop_signal) and self.evaluates_at(self.state.global_step),
            "left_out": self._left_out.record(),
            "stretches": [list(stretch) for stretch in self.loader.record().lengths],
        }

    # ---- training

    def _run(self, stop: StopRequest) -> None:
        stop.finish_steps()
        self._batches = self.loader.take(self.state.steps - self.state.global_step)
        while not (self.state.finished or self.state.stop_signal):
            if self._owes_evaluation:
                self._evaluate()
                continue
            self.ranks.phase.set("waiting for data", self.state.global_step + 1)
            batch = next(self._batches, None)
            if batch is None:  # a callback has moved the target
                self._batches = self.loader.take(self.state.steps - self.state.global_step)
                continue
            self._step(batch, stop)
            if "first step" not in self._laps.seconds:
                self._laps.end("first step")
                seconds = {phase: round(seconds, 3) for phase, seconds in self._laps.seconds.items()}
                self.checkpointer.note("first_step", step=self.state.global_step, seconds=seconds)

    def _step(self, batch: StepBatch, stop: StopRequest) -> None:
        state = self.state
        stop.passed()
        self.ranks.phase.set("training")
        self._hook("on_step_begin")
        began = time.monotonic()
        size = batch.global_batch_size
        base = self._rate(state.global_step, state.consumed_samples, size)
        result = self._run_step.run(batch, size, lambda group: base * group.get("lr_ratio", 1.0), lambda: stop.signal)
        seconds = max(time.monotonic() - began, 1e-9)
        state.stop_signal = result.stop
        if result.verdict.go_back and self._go_back(batch, result.verdict):
            return
        state.advance(size, batch.last - batch.first)
        state.loss, state.grad_norm, state.learning_rate = result.loss, result.grad_norm, base
        state.loss_scale = self.scaler.scale
        state.ckpt_status = result.verdict.ckpt_status
        self._tell_health(result.verdict, result.applied)
        state.count_update(result.applied, self.config.training.max_consecutive_skipped_steps)
        self._record(batch, result.tokens / seconds, result.id_sum)
        stop.passed()
        self._hook("on_step_end")
        if not state.stop_signal:
            self._evaluate()
        self._parallel.rest()
        if self.checkpointer.step(state):
            self._hook("on_save")
        self.console.step(state, result.tokens, self.checkpointer.last_saved_step)

    def evaluates_at(self, step: int) -> bool:
        """Whether the run evaluates after this step."""
        return self._evaluation is not None and step % self.config.training.eval_interleaved_steps == 0

    def evaluate(self) -> float:
        """Mean loss over `eval_dataset` with the model as it is; to be called on every rank.

        Raises:
            UsageError: the run evaluates never: `training.eval_interleaved_steps` is 0.
        """
        if self._evaluation is None:
            raise UsageError("there is nothing to evaluate on", hint="set training.eval_interleaved_steps")
        with self.ranks.phase.at("evaluating"):
            return self._evaluation.run(self._parallel)

    def log(self, **figures: float) -> None:
        """Adds a line to metrics.jsonl: these figures at the present step.

        Raises:
            UsageError: no run is under way.
        """
        self._logbook.figures(self.state, figures)

    def _evaluate(self) -> None:
        state, self._owes_evaluation = self.state, False
        if self.evaluates_at(state.global_step):
            state.eval_loss = self.evaluate()
            self.log(eval_loss=state.eval_loss)
            self.console.say(f"step {state.global_step}: evaluation loss {state.eval_loss:.4f}")
            self._hook("on_evaluate")

    def _record(self, batch: StepBatch, speed: float, id_sum: int) -> None:
        self.figures = {
            "tokens_per_second": round(speed, 1),
            "stall_s": round(self.checkpointer.last_stall_s, 4),
            "save_s": round(self.checkpointer.last_save_s, 4),
            "save_gib_per_s": round(self.checkpointer.last_save_rate, 3),
        }
        self._logbook.step(self.state, (batch.first, batch.last), id_sum, self.figures)

    # ---- health

    def _tell_health(self, verdict: Verdict, applied: bool) -> None:
        if verdict.why:
            left = "" if applied else "; its update was left out"
            self.console.say(f"warning: step {self.state.global_step}: {verdict.why}{left}")

    def _go_back(self, batch: StepBatch, verdict: Verdict) -> bool:
        """Returns to the newest checkpoint before the samples that went wrong, which are left out from now on.

        False, and nothing has changed, where there is no such checkpoint.
        """
        state, wrong = self.state, self._left_out.with_next(verdict.onset, batch.last)
        limit = self.config.monitor.health_checkpoint.max_rollbacks
        step, (first, last) = state.global_step + 1, wrong.ranges[-1]
        if len(wrong.ranges) > limit:
            raise TrainingError(
                f"step {step}: {verdict.why}, and the run has gone back {limit} times already",
                hint="look at the data and the learning rate; monitor.health_checkpoint.max_rollbacks allows more",
            )
        saved = self.checkpointer.go_back(first, step=step, left_out=[first, last], why=verdict.why)
        loaded = self.checkpointer.loaded
        if saved is None or loaded is None:
            self.console.say(f"warning: step {step}: there is no healthy checkpoint before it to go back to")
            return False
        self.console.say(f"step {step}: {verdict.why}; going back, without samples {first} to {last - 1}")
        self._left_out = wrong
        self._go_on_from(loaded, saved)
        self._batches = self.loader.take(state.steps - state.global_step)
        self._logbook.go_on({**self._header(), "why": verdict.why})
        self._hook("on_rollback")
        return True

    def _leave_out(self, left_out: LeftOut) -> None:
        """Leaves out these samples and those found in this process."""
        self._left_out = left_out | self._left_out
        if self._left_out.ranges:
            self.loader.leave_out(self._left_out.ranges)

    def _finish(self, stop: StopRequest) -> None:
        """The last save, awaited; a stop by a signal is one more reason for it, and leaves an evaluation to the next
        start, unless the last step is done."""
        state = self.state
        stop.reached()
        if state.stop_signal and self.config.checkpoint.enable_save:
            last = f"the last save took {self.checkpointer.last_save_s:.1f} s"
            self.console.say(f"stopping at step {state.global_step}: saving ({last})")
        self._parallel.rest()
        if self.checkpointer.save(state, wait=True):
            self._hook("on_save")
        if state.stop_signal and state.finished:
            self._evaluate()
        self._hook("on_train_end")
        where = f"; saved below {self.checkpointer.path}" if self.config.checkpoint.enable_save else ""
        self.console.say(f"step {state.global_step} of {state.steps}, loss {state.loss:.4f}{where}")

    def _header(self) -> dict[str, Any]:
        """The head of what is written from here on."""
        return header_of(self.state, self.checkpointer, self._left_out.ranges, self.loader.record(), self._moved)

    def _open_histories(self) -> None:
        held = self.checkpointer.path if self.config.checkpoint.enable_save else None
        config, attempt = dump_config(self.config), self.state.attempt
        self._logbook.open(self._header(), config, attempt=attempt, locked_already=held)

    def _hook(self, name: str) -> None:
        call_hooks(self._callbacks, name, self, self.state)
