"""CUDA streams: what threads of ours read and write must be finished, or not begun, on the stream of the caller."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["devices_of", "join", "settle"]


def devices_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The CUDA devices that any of the tensors is on."""
    return tuple({tensor.device for tensor in tensors if tensor.is_cuda})


def settle(devices: Iterable[torch.device]) -> None:
    """Returns when what this thread has under way on the devices is done; other threads have streams of their own."""
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def join(devices: Iterable[torch.device]) -> None:
    """Returns when what any thread has under way on the devices is done, whatever stream the caller goes on in."""
    for device in devices:
        torch.cuda.synchronize(device)
