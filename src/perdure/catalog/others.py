"""What else a path may hold that is no checkpoint of ours, and the way here: told by names alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

__all__ = ["way_here"]

_TORCH_FILE = (".pt", ".pth", ".ckpt", ".bin")
_NUMBERED = re.compile(r"(checkpoint|iter|global_step|step|epoch)[-_=]?(\d+)")


def way_here(path: str, names: Sequence[str] | None) -> str | None:
    """What to type for what somebody else's program left at a path; None where it is not known.

    Args:
        names: what the directory holds; None for a file.
    """
    if names is None:
        if path.endswith(_TORCH_FILE):
            return f"perdure import --from torch {path} ROOT, then name ROOT"
        weights = "call it model.safetensors in a directory of its own, and name that"
        return weights if path.endswith(".safetensors") else None
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return f"perdure import --from torch-dcp {path} ROOT, then name ROOT"
    if files := sorted(name for name in names if name.endswith(_TORCH_FILE)):
        return f"perdure import --from torch {os.path.join(path, files[0])} ROOT, then name ROOT"
    inside = [(int(found[2]), name) for name in names if (found := _NUMBERED.fullmatch(name))]
    return (
        f"another program's run? name one of its checkpoints: {os.path.join(path, max(inside)[1])}" if inside else None
    )
