"""Loading the weights below an adapter, from `base_load_path`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from perdure.config.schema import CheckpointConfig
from perdure.engine.base import Base, base_name, contents
from perdure.engine.live import Live
from perdure.engine.ranks import Ranks
from perdure.engine.restore import Restore
from perdure.engine.saveroot import SaveRoot
from perdure.state.model import frozen_and_buffers
from perdure.state.shards import NamedTensor

__all__ = ["load_base"]


def load_base(
    config: CheckpointConfig, live: Live, save_root: SaveRoot, ranks: Ranks, say: Callable[[str], None]
) -> Base:
    """Loads `base_load_path` (anything that `load_path` may be) into the model; adapters stay as they were built.

    Raises:
        CheckpointNotFoundError: nothing is there.
        MismatchError: it lacks a frozen weight, or is of another model.
        DamagedCheckpointError: it is not what was written; there is nothing to fall back to.
    """
    own = {"load_path": config.base_load_path, "no_load_optim": True, "auto_resume": False, "on_corrupt": "error"}
    below = config.model_copy(update={**own, "load_healthy": False})
    loaded = Restore(below, _Below(live), save_root, ranks, restore_settings=False, say=say).run(None)
    assert loaded is not None
    base = Base(loaded.path, live, ranks, contents(live, ranks, loaded.model_tensors))
    base.settle()
    say(
        f"base weights from {loaded.path}: {len(base.sums)} tensors, {len(base.kept)} of them frozen "
        f"({loaded.bytes_read / 2**20:,.1f} MiB in {loaded.seconds:.2f} s)"
    )
    return base


class _Below(Live):
    """The model as its base knows it: without what an adapter adds, under the names from before it was wrapped."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.model, live.optimizer, {})

    def tensors(self) -> list[NamedTensor]:
        return [msgspec.structs.replace(t, aliases=(*t.aliases, base_name(t.name))) for t in super().tensors()]

    def elsewhere(self) -> frozenset[str]:
        frozen, _ = frozen_and_buffers(self.model)
        return frozenset(t.name for t in super().tensors() if t.name not in frozen)
