"""How models of the transformers library are cut by tensors: their own plan, in the styles of torch.

Their plan names linear layers only. Here every parameter becomes a DTensor, since optimizers and gradient norms cannot
mix kinds: the input embedding is cut by its rows, which keeps it alike to a tied output; what the plan does not name
is replicated. Activations between blocks are whole on every rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from perdure.errors import UsageError

__all__ = ["transformers_plan"]

# Their names of styles -> ours. A per-head norm sees the heads of its rank, so that its gradient is a part.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


class _Replicated(ParallelStyle):
    """A module whose parameters are whole on every rank, as DTensors; it takes and gives plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
            return tuple(
                DTensor.from_local(each, mesh, (Replicate(),), run_check=False)
                if isinstance(each, Tensor) and not isinstance(each, DTensor)
                else each
                for each in inputs
            )

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


def transformers_plan(model: Any, degree: int) -> dict[str, ParallelStyle]:
    """The plan of a causal language model for `degree` ranks: a style for each module that holds parameters.

    Raises:
        UsageError: the library has no plan for it, one of a kind that is not known here, or sizes don't divide.
    """
    config, kind = model.config, type(model).__name__
    prefix = model.base_model_prefix
    theirs = {f"{prefix}.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not theirs:
        raise UsageError(
            f"parallelism.tensor_parallel: the transformers library has no plan for {kind}",
            hint="shard it by parallelism.data_parallel_shard instead",
        )
    theirs.update(type(model)._tp_plan or {})
    unknown = sorted({style for style in theirs.values() if style not in _STYLES})
    if unknown:
        raise UsageError(
            f"parallelism.tensor_parallel: the plan of {kind} has {', '.join(unknown)}, which is not built here",
            hint="shard it by parallelism.data_parallel_shard instead",
        )
    for key in _DIVIDED:
        size = getattr(config, key, None)
        if isinstance(size, int) and size % degree:
            raise UsageError(
                f"parallelism.tensor_parallel: model.{key} {size} does not divide among {degree} ranks",
                hint=f"choose a degree that divides model.{key}",
            )
    embedding = model.get_input_embeddings()
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        style = next((style for pattern, style in theirs.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if module is embedding:
            style = "embedding_rowwise"
        plan[name] = _STYLES[style]() if style is not None else _Replicated()
    return plan
