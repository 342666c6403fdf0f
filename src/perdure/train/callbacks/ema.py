"""An exponential moving average of the weights, evaluated and exported on wish."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perdure.engine.writer import WriteBuffers, write_tensors
from perdure.errors import TrainingError, UsageError
from perdure.format.safetensors import lay_out
from perdure.state.model import live_tensors, named_parameters
from perdure.state.shards import describe
from perdure.storage.local import LocalStorage
from perdure.train.callbacks.base import Callback
from perdure.train.state import TrainerState

__all__ = ["EMA"]


class EMA(Callback):
    """After each step, average = decay · average + (1 - decay) · weights, in float32, from the first weights on.

    Averages are of all trainable parameters (of their FP32 masters, where they have some), lie as the parameters do
    (sharded under FSDP2) and are saved and restored with the run, bit for bit.

    Args:
        decay: how much of the average stays at each update.
        every: steps between two updates.
        evaluate: where the run evaluates, evaluate the average too; `ema_eval_loss` goes into metrics.jsonl.
        export: directory that gets the averaged model as `model.safetensors` when training ends; a `load_path` for
            weights only.

    Raises:
        UsageError: decay or interval is out of range; or the run is cut into pipeline stages.
    """

    def __init__(self, decay: float = 0.999, *, every: int = 1, evaluate: bool = False, export: str = "") -> None:
        if not 0.0 <= decay < 1.0 or every < 1:
            raise UsageError(f"EMA: expected 0 <= decay < 1 and every >= 1, found {decay} and {every}")
        self.decay, self.every, self._evaluates, self._export = decay, every, evaluate, export
        self.weights: dict[str, Tensor] = {}
        self.updates = 0
        self._restored, self._saved_decay = False, decay

    def on_build(self, trainer: Any, state: TrainerState) -> None:
        """Takes the first weights; what a resume brings replaces them."""
        if trainer.mesh.pipeline is not None:
            raise UsageError("EMA: not built yet for pipeline stages")
        self.weights = {name: value.detach().float().clone() for name, value in self._current(trainer).items()}

    def on_train_begin(self, trainer: Any, state: TrainerState) -> None:
        if not self._restored:
            # Weights that a run starts from, or goes on from without an average, are loaded by now.
            self.on_build(trainer, state)
        elif self._saved_decay != self.decay:
            trainer.console.say(f"changed since the checkpoint: EMA decay: {self._saved_decay:g} -> {self.decay:g}")

    @torch.no_grad()
    def on_step_end(self, trainer: Any, state: TrainerState) -> None:
        if state.global_step % self.every == 0:
            current = self._current(trainer)
            for name, average in self.weights.items():
                average.lerp_(current[name].detach().float(), 1.0 - self.decay)
            self.updates += 1

    def on_evaluate(self, trainer: Any, state: TrainerState) -> None:
        if self._evaluates:
            with self.applied(trainer.model):
                loss = trainer.evaluate()
            trainer.log(ema_eval_loss=loss)
            trainer.console.say(f"step {state.global_step}: evaluation loss of the average {loss:.4f}")

    def on_train_end(self, trainer: Any, state: TrainerState) -> None:
        if self._export:
            self._write(trainer)

    @contextlib.contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """The model with the average for its weights, which are put back in every bit afterwards."""
        live = {name: p for p, name in named_parameters(model) if name in self.weights}
        before = {name: parameter.detach().clone() for name, parameter in live.items()}
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(self.weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in live.items():
                    parameter.copy_(before[name])

    def layout_of(self, path: str) -> Tensor | None:
        """How the tensor at a path of the state lies; see `Stateful`."""
        return self.weights.get(path.removeprefix("weights."))

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, how many updates they have had, and with which decay."""
        return {"weights": self.weights, "updates": self.updates, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; a parameter that was not averaged then starts with its own value."""
        saved: dict[str, Tensor] = state["weights"]
        for name in self.weights.keys() & saved.keys():
            self.weights[name] = saved[name].to(self.weights[name].device)
        self.updates, self._restored = int(state["updates"]), True
        self._saved_decay = float(state.get("decay", self.decay))

    @staticmethod
    def _current(trainer: Any) -> dict[str, Tensor]:
        master = getattr(trainer.optimizer, "main_param_of", lambda parameter: None)
        return {
            name: p if (main := master(p)) is None else main
            for p, name in named_parameters(trainer.model)
            if p.requires_grad and p.is_floating_point()
        }

    def _write(self, trainer: Any) -> None:
        """The whole model with its averages in one file, one tensor in full at a time; every rank takes part."""
        tensors = {**live_tensors(trainer.model), **self.weights}
        rows = [(name, (told := describe("model", name, t)).dtype, told.shape) for name, t in tensors.items()]

        def whole(name: str) -> Tensor:
            tensor: Any = tensors[name].detach()
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]

        if not trainer.ranks.is_first:
            for name in lay_out(rows):
                whole(name)
            return
        buffers = WriteBuffers()
        try:
            os.makedirs(self._export, exist_ok=True)
            path = os.path.join(self._export, "model.safetensors")
            with contextlib.suppress(FileNotFoundError):
                # What a run that was killed here has left.
                os.unlink(path + ".partial")
            write_tensors(
                LocalStorage(), path + ".partial", "model.safetensors", rows, whole, {"format": "pt"}, buffers
            )
            os.replace(path + ".partial", path)
        except OSError as error:
            raise TrainingError(f"EMA: the average could not be written to {self._export}: {error}") from error
        finally:
            buffers.close()
        trainer.console.say(f"the average of {self.updates} updates is in {path}")
