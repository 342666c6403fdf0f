"""Evaluation between steps: the same samples in the same order each time, and training notices nothing.

The evaluation has a loader of its own and gives the random streams back as they were, so neither draws nor
cursor of the run are touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perdure.data.stepping import MicroBatch, SteppedLoader
from perdure.engine.ranks import Ranks
from perdure.errors import DataError
from perdure.parallel.apply import Parallel
from perdure.parallel.mesh import Mesh
from perdure.state.random import RandomState, seed_streams
from perdure.train.step import LossFunction, loss_and_count, to_device

__all__ = ["Evaluation"]

_EVALUATION = 0x6576616C


class Evaluation:
    """The mean loss over a data set.

    Whole global batches are evaluated; a rest that is smaller than one is left out, so that all ranks
    do the same work.

    Raises:
        DataError: the data set is smaller than one global batch.
    """

    def __init__(
        self,
        loader: SteppedLoader,
        *,
        loss: LossFunction,
        ranks: Ranks,
        mesh: Mesh,
        device: torch.device,
        seed: int,
    ) -> None:
        self._loader, self._seed = loader, seed
        self._loss, self._ranks, self._mesh, self._device = loss, ranks, mesh, device
        self._steps = loader.length // loader.global_batch_size
        if self._steps == 0:
            raise DataError(
                f"eval_dataset has {loader.length} samples, fewer than one global batch of {loader.global_batch_size}",
                hint="evaluate on more data, or lower training.global_batch_size",
            )

    @torch.no_grad()
    def run(self, parallel: Parallel) -> float:
        """Mean loss per valid token (or sample) over the data set, the same on every rank.

        Random streams are given back as they were, and stand at the same place for the same samples each time.
        """
        streams, drawn = RandomState(), RandomState().state_dict()
        try:
            return self._run(parallel)
        finally:
            parallel.rest()
            streams.load_state_dict(drawn)

    def _run(self, parallel: Parallel) -> float:
        model, pipeline = parallel.model, parallel.pipeline
        was_training = model.training
        model.eval()
        loss_sum: Tensor | float = 0.0
        tokens: Tensor | float = 0.0
        self._loader.seek(0)
        for batch in self._loader.take(self._steps):
            micro_batches = batch.micro_batches

            def loss(index: int, model: Any, micro_batches: Sequence[MicroBatch] = micro_batches) -> Tensor:
                nonlocal loss_sum, tokens
                micro = micro_batches[index]
                seed_streams(self._seed, _EVALUATION, micro.first)
                value, count = loss_and_count(self._loss, model, to_device(micro.data, self._device), len(micro.ids))
                loss_sum, tokens = loss_sum + value.double(), tokens + count
                return value

            def seed(index: int, stage: int, micro_batches: Sequence[MicroBatch] = micro_batches) -> None:
                seed_streams(self._seed, _EVALUATION, micro_batches[index].first, stage)

            if pipeline is not None:
                pipeline.evaluate(len(micro_batches), loss, seed)
            else:
                for index in range(len(micro_batches)):
                    loss(index, model)
        model.train(was_training)
        sums = torch.tensor([float(loss_sum), float(tokens)], dtype=torch.float64, device="cpu") * self._mesh.counts
        total, count = self._ranks.sum(sums, "evaluating").tolist()
        return float(total / (count or 1.0))

    def close(self) -> None:
        """Ends the workers."""
        self._loader.close()
