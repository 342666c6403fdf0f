"""The peers that Perdure is measured against, each used as its documentation says, and made durable."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common.raw import sync_tree
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]

__all__ = ["LOADS", "SAVES", "newer", "path_of"]


def path_of(folder: Path, name: str) -> Path:
    """Where a peer's checkpoint lies."""
    return folder / {"safetensors": "s.safetensors", "torch.save": "t.pt", "DCP": "dcp"}.get(name, "newer")


def _torch_save(state: State, path: Path) -> None:
    torch.save(state, path)
    sync_tree(path)


def _safetensors_save(state: State, path: Path) -> None:
    save_file(state, path)
    sync_tree(path)


def _dcp_save(state: State, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    sync_tree(path)


def _copy_in(state: State, loaded: State) -> None:
    for key, tensor in state.items():
        tensor.copy_(loaded[key])


SAVES: dict[str, Callable[[State, Path], None]] = {
    "safetensors": _safetensors_save,
    "torch.save": _torch_save,
    "DCP": _dcp_save,
}
LOADS: dict[str, Callable[[State, Path], None]] = {
    "safetensors": lambda state, path: _copy_in(state, load_file(path)),
    "torch.save": lambda state, path: _copy_in(state, torch.load(path, mmap=True, weights_only=True)),
    "DCP": lambda state, path: dcp.load(state, checkpoint_id=str(path), no_dist=True),
}


def newer(folder: Path) -> tuple[Callable[[State], None], Callable[[State], None]] | None:
    """Save and load of the package torch_checkpointing, where it is installed and runs here."""
    try:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    except ImportError:
        return None
    # Its O_DIRECT needs writes that torch.save does not make, and fails on ext4 (version 0.1.1).
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()
    path = folder / "newer"

    def save(state: State) -> None:
        shutil.rmtree(path, ignore_errors=True)
        manager.save(str(path), {"state": state})
        sync_tree(path)

    def load(state: State) -> None:
        manager.load(str(path), into={"state": state})

    return save, load
