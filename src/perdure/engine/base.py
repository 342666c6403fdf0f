"""The frozen weights below an adapter: left out of saves, known by their contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perdure.engine.live import Live
from perdure.engine.ranks import Ranks
from perdure.errors import MismatchError
from perdure.state.fingerprint import digest_of_sums, piece_sums, total_sums
from perdure.state.model import frozen_and_buffers

__all__ = ["Base", "base_name", "contents"]


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

    def settle(self, brought: frozenset[str] = frozenset()) -> None:
        """Notes what is the base's own after a load, which may have brought other weights with it."""
        frozen = frozen_and_buffers(self.live.model)[0].intersection(self.sums)
        now = contents(self.live, self.ranks, frozen & brought)
        kept = [name for name in frozen if now.get(name, self.sums[name]) == self.sums[name]]
        self.kept = frozenset().union(*self.ranks.gather(kept, "comparing the base"))

    def record(self) -> dict[str, Any]:
        """What metadata.json says of the weights that a save leaves out."""
        sums = {base_name(name): self.sums[name] for name in self.kept}
        return {"path": self.path, "fingerprint": digest_of_sums(sums), "tensors": len(sums)}


def base_name(name: str) -> str:
    """The name that a weight has in its base, where `peft` has wrapped the model around it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def contents(live: Live, ranks: Ranks, names: frozenset[str]) -> dict[str, int]:
    """A sum for each of the named tensors that no cut over ranks changes, the same on all ranks."""
    mine = ranks.together(lambda: piece_sums([t for t in live.tensors() if t.name in names]), "looking at the base")
    return total_sums(ranks.gather(mine, "comparing the base"))
