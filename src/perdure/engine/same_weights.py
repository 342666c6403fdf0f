"""One model on all ranks before it is cut: a rank that drew or read other weights takes those of the first."""

from __future__ import annotations

import torch
from torch import nn

from perdure.engine.ranks import Ranks
from perdure.engine.replicas import digest_of_edges
from perdure.engine.writer import memory_of
from perdure.errors import few
from perdure.state.model import live_tensors
from perdure.state.shards import is_plain

__all__ = ["take_the_first_ones"]

_DOING = "comparing the weights of the ranks"


@torch.no_grad()
def take_the_first_ones(model: nn.Module, ranks: Ranks) -> str:
    """Gives every rank the parameters and persistent buffers of rank 0, where any of them differ.

    Their edges are compared: weights of another draw or another file differ there. What is sharded already, or has no
    memory yet, is left alone.

    Args:
        model: of the same names and shapes on all ranks.

    Returns:
        What there is to say of it: "" where they are alike.
    """
    if ranks.size == 1:
        return ""
    tensors = {name: t.detach() for name, t in live_tensors(model).items() if is_plain(t) and not t.is_meta}
    found = ranks.compare({name: str(digest_of_edges([t])) for name, t in tensors.items()}, _DOING)
    if not found:
        return ""
    for name, tensor in tensors.items():
        plain = tensor.cpu().contiguous()
        given = ranks.share(bytes(memory_of(plain)) if ranks.is_first else b"", f"taking {name} from rank 0")
        if not ranks.is_first:
            memory_of(plain)[:] = given
            tensor.copy_(plain)
    return f"the ranks were given different weights ({few(found)}); all start from those of rank 0"
