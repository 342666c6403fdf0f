"""The frozen weights below an adapter: loaded from `base_load_path`, left out of saves, known by their contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from perdure.config.schema import CheckpointConfig
from perdure.engine.live import Live
from perdure.engine.ranks import Ranks
from perdure.engine.restore import Loaded, Restore
from perdure.engine.saveroot import SaveRoot
from perdure.errors import MismatchError
from perdure.state.fingerprint import digest_of_sums, piece_sums, total_sums
from perdure.state.model import frozen_names
from perdure.state.shards import NamedTensor

__all__ = ["Base", "load_base"]


@dataclass
class Base:
    """What was loaded below an adapter.

    `sums` tells each tensor that the base gave by its contents; `kept` are the frozen ones of them that still hold
    just that, so that a save may leave them out. Both are the same on all ranks.
    """

    path: str
    live: Live
    ranks: Ranks
    sums: dict[str, int]
    kept: frozenset[str] = field(default=frozenset())

    def check(self, described: dict[str, Any], absent: frozenset[str], where: str) -> None:
        """Whether a checkpoint that lacks the tensors `absent` was trained over this base.

        Raises:
            MismatchError: over another one; both fingerprints are told.
        """
        unknown = sorted(absent - set(self.sums))
        found = digest_of_sums({base_name(name): self.sums[name] for name in absent if name in self.sums})
        if unknown or found != described.get("fingerprint"):
            raise MismatchError(
                f"{where} was trained over another base than {self.path}: the contents of its {len(absent)} tensors "
                f"are {described.get('fingerprint')} there and {found} here",
                hint=f"name the base that it was trained over: checkpoint.base_load_path={described.get('path')}",
            )

    def settle(self, loaded: Loaded | None) -> None:
        """Notes what is the base's own after a load, which may have brought other frozen weights with it."""
        frozen = frozen_names(self.live.model).intersection(self.sums)
        brought = frozen & loaded.model_tensors if loaded is not None else frozenset()
        now = _sums(self.live, self.ranks, brought)
        kept = [name for name in frozen if now.get(name, self.sums[name]) == self.sums[name]]
        self.kept = frozenset().union(*self.ranks.gather(kept, "comparing the base"))

    def record(self) -> dict[str, Any]:
        """What metadata.json says of the weights that a save leaves out."""
        sums = {base_name(name): self.sums[name] for name in self.kept}
        return {"path": self.path, "fingerprint": digest_of_sums(sums), "tensors": len(sums)}


def base_name(name: str) -> str:
    """The name that a weight has in its base, where `peft` has wrapped the model around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


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
    base = Base(loaded.path, live, ranks, _sums(live, ranks, loaded.model_tensors))
    base.settle(None)
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
        return [replace(t, aliases=(*t.aliases, base_name(t.name))) for t in super().tensors()]

    def elsewhere(self) -> frozenset[str]:
        frozen = frozen_names(self.model)
        return frozenset(t.name for t in super().tensors() if t.name not in frozen)


def _sums(live: Live, ranks: Ranks, names: frozenset[str]) -> dict[str, int]:
    mine = ranks.together(lambda: piece_sums([t for t in live.tensors() if t.name in names]), "looking at the base")
    return total_sums(ranks.gather(mine, "comparing the base"))
