"""The reference decoder: a small causal language model that is read in one sitting.

RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU. Parameter names follow the Llama
convention (`layers.0.self_attn.q_proj.weight`). What matters for resuming and for parallel layouts:

- `layers` is a ModuleDict keyed by the global layer index, and any of `embed_tokens`, `norm`, `lm_head` may be set to
  None, so that a pipeline stage keeps the names of the whole model.
- There are no buffers: rotary angles are computed in every forward pass, so nothing has to be saved or rebuilt.
- Numbers: every weight is cast to `compute_dtype` where it is used (no autocast), norms and angles are computed in
  float32, gradients arrive in `params_dtype`. With both float32 no cast takes place at all.
- Dropout sits behind the embedding and behind each block, not on attention probabilities.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perdure.errors import UsageError
from perdure.importing import KeyFaults

__all__ = ["Decoder"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Linear(nn.Linear):
    """A matrix without bias, applied in the dtype of its input. [..., in_features] -> [..., out_features]"""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype)

    def reset_parameters(self) -> None:
        """Left to `Decoder.reset_parameters`, which draws everything in one place."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class Embedding(nn.Embedding):
    """Token vectors in `compute_dtype`. [B, S] -> [B, S, H]"""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        super().__init__(vocab_size, hidden_size, dtype=dtype)
        self.compute_dtype = compute_dtype

    def reset_parameters(self) -> None:
        """Left to `Decoder.reset_parameters`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).to(self.compute_dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, in float32; same shape and dtype as the input."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


def rotary_angles(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position · theta^(-2i/head_dim), each [S, head_dim/2], float32."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim/2) of x [B, S, heads, head_dim] by the angles of their position."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; the number of heads is read off the projections, so that a tensor-parallel rank's share
    of them works as it is. [B, S, H] -> [B, S, H]"""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = hidden_size // heads
        self.q_proj = Linear(hidden_size, heads * self.head_dim, dtype)
        self.k_proj = Linear(hidden_size, kv_heads * self.head_dim, dtype)
        self.v_proj = Linear(hidden_size, kv_heads * self.head_dim, dtype)
        self.o_proj = Linear(heads * self.head_dim, hidden_size, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        shared = query.shape[2] // key.shape[2]
        if shared > 1:
            key, value = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). [B, S, H] -> [B, S, H]"""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """One residual block: attention, then feed-forward. [B, S, H] -> [B, S, H]"""

    def __init__(self, attention: Attention, mlp: FeedForward, norms: tuple[RMSNorm, RMSNorm], dropout: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return cast(Tensor, x + self.dropout(self.mlp(self.post_attention_layernorm(x))))


class Decoder(nn.Module):
    """A causal language model.

    Args:
        vocab_size: number of token ids; the default fits bytes and one separator.
        intermediate_size: width of the feed-forward; default 8/3 of `hidden_size`, rounded up to a multiple of 64.
        num_key_value_heads: default `num_attention_heads`.
        max_position_embeddings: longest sequence accepted.
        dropout: probability, in training mode only.
        tie_word_embeddings: one tensor under the names `embed_tokens.weight` and `lm_head.weight`.
        params_dtype: float32, bfloat16 or float16; what parameters are stored in.
        compute_dtype: what the forward pass computes in; default `params_dtype`.

    Raises:
        KeyFaults: sizes that do not divide (with the nearest that do), or values out of range; all in one go.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 257,
        hidden_size: int = 256,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        max_position_embeddings: int = 2048,
        dropout: float = 0.0,
        tie_word_embeddings: bool = False,
        params_dtype: str = "float32",
        compute_dtype: str | None = None,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        heads, kv_heads = num_attention_heads, num_key_value_heads or num_attention_heads
        intermediate_size = intermediate_size or math.ceil(hidden_size * 8 / 3 / 64) * 64
        faults = [(key, f"{value} is not a positive integer") for key, value in (
            ("vocab_size", vocab_size), ("hidden_size", hidden_size), ("intermediate_size", intermediate_size),
            ("num_hidden_layers", num_hidden_layers), ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads), ("max_position_embeddings", max_position_embeddings),
        ) if value < 1]  # fmt: skip
        faults += [
            (key, f"`{value}` is not one of {', '.join(_DTYPES)}")
            for key, value in (("params_dtype", params_dtype), ("compute_dtype", compute_dtype))
            if value is not None and value not in _DTYPES
        ]
        if not 0.0 <= dropout < 1.0:
            faults.append(("dropout", f"{dropout} is not in [0, 1)"))
        faults = faults or _size_faults(hidden_size, heads, kv_heads)
        if faults:
            raise KeyFaults([(f"model.{key}", text) for key, text in faults])

        dtype, compute = _DTYPES[params_dtype], _DTYPES[compute_dtype or params_dtype]
        self.rope_theta, self.head_dim, self.max_positions = rope_theta, hidden_size // heads, max_position_embeddings
        self.num_hidden_layers, self.tie_word_embeddings = num_hidden_layers, tie_word_embeddings
        # Optional: a pipeline stage sets what it does not hold to None.
        self.embed_tokens: Embedding | None = Embedding(vocab_size, hidden_size, dtype, compute)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleDict(
            {
                str(index): DecoderLayer(
                    Attention(hidden_size, heads, kv_heads, dtype),
                    FeedForward(hidden_size, intermediate_size, dtype),
                    (RMSNorm(hidden_size, rms_norm_eps, dtype), RMSNorm(hidden_size, rms_norm_eps, dtype)),
                    dropout,
                )
                for index in range(num_hidden_layers)
            }
        )
        self.norm: RMSNorm | None = RMSNorm(hidden_size, rms_norm_eps, dtype)
        self.lm_head: Linear | None = Linear(hidden_size, vocab_size, dtype)
        self.tie_weights()
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Make `lm_head.weight` the very tensor of `embed_tokens.weight`, where tying is on and both are here.

        To be called again after anything that replaces parameters (tensor parallelism, `to_empty`).
        """
        if self.tie_word_embeddings and self.embed_tokens is not None and self.lm_head is not None:
            self.lm_head.weight = self.embed_tokens.weight

    def tensor_parallel_plan(self, degree: int) -> dict[str, Any]:
        """How torch's `parallelize_module` cuts this model over `degree` ranks."""
        from perdure.models.decoder_plan import decoder_plan

        return decoder_plan(self, degree)

    def pipeline_plan(self) -> tuple[list[str], list[str], list[str]]:
        """The modules in the order in which they work: before the layers, the layers, after them."""
        return ["embed_tokens"], [f"layers.{index}" for index in self.layers], ["norm", "lm_head"]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights from torch's default generator: normal, std 0.02, and 0.02/√(2·layers) for the two
        matrices of a block that feed the residual stream; norms are ones. Drawn in float32 and then rounded, so that
        the same seed gives a low-precision model the rounded weights of the float32 one."""
        narrow = 0.02 / math.sqrt(2 * self.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = narrow if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, std))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids [B, S] (int64) -> logits [B, S, vocab_size] in `compute_dtype`.

        On a pipeline stage without `embed_tokens` the input is the hidden states [B, S, H] of the stage before, and
        without `lm_head` the output is hidden states.

        Raises:
            UsageError: S is greater than `max_position_embeddings`.
        """
        length = input_ids.shape[1]
        if length > self.max_positions:
            raise UsageError(
                f"a sequence of {length} tokens is longer than model.max_position_embeddings ({self.max_positions})",
                hint=f"set model.max_position_embeddings={length} or a smaller seq_length",
            )
        x = input_ids if self.embed_tokens is None else self.dropout(self.embed_tokens(input_ids))
        cos, sin = rotary_angles(length, self.head_dim, self.rope_theta, x.device)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        x = x if self.norm is None else self.norm(x)
        return cast(Tensor, x if self.lm_head is None else self.lm_head(x))


def _size_faults(hidden_size: int, heads: int, kv_heads: int) -> list[tuple[str, str]]:
    faults = []
    unit = 2 * heads
    if hidden_size % unit:
        below, above = hidden_size // unit * unit, (hidden_size // unit + 1) * unit
        nearest = f"{below} and {above}" if below else f"{above}"
        faults.append(
            ("hidden_size", f"{hidden_size} is not a multiple of 2 × {heads} heads; nearest valid: {nearest}")
        )
    if heads % kv_heads:
        divisors = [each for each in range(1, heads + 1) if heads % each == 0]
        around = [max(d for d in divisors if d < kv_heads), *(d for d in divisors if d > kv_heads)][:2]
        nearest = " and ".join(map(str, around))
        text = f"{kv_heads} does not divide the {heads} attention heads; nearest valid: {nearest}"
        faults.append(("num_key_value_heads", text))
    return faults
