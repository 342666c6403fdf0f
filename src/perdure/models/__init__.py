"""Models: a small reference decoder, adapters to transformers and to any `nn.Module`."""

from __future__ import annotations

from perdure.models.build import build_model

__all__ = ["build_model"]
