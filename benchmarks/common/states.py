"""What is saved and loaded in the benchmarks: a model and its AdamW state of a given size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["build", "flat", "size_of"]


def build(gib: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A third of `tensors` parameters whose weights and two moments make `gib`."""
    count = max(tensors // 3, 1)
    size = max(int(gib * (1 << 30) / 12 / count), 1)
    model = nn.Module()
    for number in range(count):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state under one name, as the peers take it."""
    state = {f"model.{k}": v.detach() for k, v in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optim.{key}.{name}"] = value
    return state


def size_of(state: dict[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in state.values())
