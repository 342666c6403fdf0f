"""How the reference decoder is cut by tensor and sequence parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from perdure.errors import UsageError

if TYPE_CHECKING:
    from perdure.models.decoder import Decoder

__all__ = ["decoder_plan"]


def decoder_plan(model: Decoder, degree: int) -> dict[str, Any]:
    """Attention heads and feed-forward columns over `degree` ranks; norms and residuals by sequence.

    A pipeline stage takes and gives whole hidden states, and cuts them by sequence within.

    Raises:
        UsageError: the key/value heads don't divide.
    """
    first = next(iter(model.layers.values()))
    heads = first.self_attn.k_proj.out_features // first.self_attn.head_dim  # type: ignore[union-attr, operator]
    if heads % degree:
        raise UsageError(
            f"parallelism.tensor_parallel: {heads} key/value heads don't divide among {degree} ranks",
            hint="choose a degree that divides model.num_key_value_heads",
        )
    plan: dict[str, Any] = {}
    names = list(model.layers)
    whole_in: dict[str, Any] = {
        "input_layouts": (Replicate(), None, None),
        "desired_input_layouts": (Shard(1), None, None),
    }
    whole_out: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    if model.embed_tokens is not None:
        plan["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    elif model.norm is None and len(names) == 1:
        # Newer than the oldest torch that everything else here works with.
        from torch.distributed.tensor.parallel import PrepareModuleInputOutput

        plan[f"layers.{names[0]}"] = PrepareModuleInputOutput(
            **whole_in, **whole_out, use_local_input=True, use_local_output=True
        )
    else:
        plan[f"layers.{names[0]}"] = PrepareModuleInput(**whole_in, use_local_output=True)
    if model.norm is not None:
        plan["norm"] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    else:
        plan.setdefault(f"layers.{names[-1]}", PrepareModuleOutput(**whole_out, use_local_output=True))
    for index in names:
        block = f"layers.{index}"
        plan |= {
            f"{block}.input_layernorm": SequenceParallel(),
            f"{block}.post_attention_layernorm": SequenceParallel(),
            f"{block}.self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{block}.self_attn.q_proj": ColwiseParallel(),
            f"{block}.self_attn.k_proj": ColwiseParallel(),
            f"{block}.self_attn.v_proj": ColwiseParallel(),
            f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{block}.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"{block}.mlp.gate_proj": ColwiseParallel(),
            f"{block}.mlp.up_proj": ColwiseParallel(),
            f"{block}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan
