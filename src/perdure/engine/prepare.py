"""What training waits for at a save, but for the copy: the live objects are read, and all ranks agree on a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perdure.catalog.publish import Staging, stage
from perdure.config.schema import CheckpointConfig
from perdure.engine.base import Base
from perdure.engine.filing import Filing
from perdure.engine.linked import Linkable, bytes_of
from perdure.engine.live import Live
from perdure.engine.own_record import to_record
from perdure.engine.plan import Planner
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.engine.replicas import check_replicas
from perdure.engine.save import Identity, SaveJob
from perdure.engine.saveroot import SaveRoot
from perdure.errors import RanksError, SaveError
from perdure.format.collector import collector_paused
from perdure.format.common import CommonInfo
from perdure.state.model import frozen_and_buffers

__all__ = ["Preparer"]


class Preparer:
    """Makes save jobs; what follows from the layout alone is kept while that stands.

    Args:
        training: called at each save for what else a resume must compare.
        before_commit: makes the ledger durable; gives its length and digest.
        say: receives one line per event worth telling.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        live: Live,
        save_root: SaveRoot,
        ranks: Ranks,
        *,
        training: Callable[[], dict[str, Any]],
        before_commit: Callable[[], tuple[int, str]],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._live, self._save_root, self._ranks = config, live, save_root, ranks
        self._training, self._before_commit, self._say = training, before_commit, say
        self._planner = Planner(ranks, config.remove_redundancy)
        self._filing = Filing(ranks.rank)
        self._compared = False

    def expected_bytes(self) -> int:
        """About how many bytes this rank will write at a save, where all of it lies in host memory; else 0."""
        return self._live.host_bytes(self._ranks.size if self._config.remove_redundancy else 1)

    @collector_paused()
    def job(self, progress: Progress, base: Base | None, links: Mapping[str, Linkable]) -> SaveJob:
        """A save of the state as it is, with a partial directory of its own.

        Args:
            base: the weights that an adapter was loaded onto, where it was.
            links: files of frozen weights that may be linked instead of written.

        Raises:
            SaveError: there is no room, the directory cannot be made, or ranks differ in what they hold in common.
            UnsupportedStateError: something cannot be held; it is named.
            RanksError: the ranks are at different places.
        """
        common, own = self._agreed(progress)
        adapter = base if self._config.save_trainable_only else None
        state, tensors = self._live.collect(
            self._ranks,
            with_optimizer=not self._config.no_save_optim,
            leave_out=adapter.kept if adapter is not None else frozenset(),
        )
        training = {**own, **state, **({"base": adapter.record()} if adapter and adapter.kept else {})}
        frozen, buffers = frozen_and_buffers(self._live.model)
        plan = self._planner.plan(tensors, buffers)
        if not self._compared:
            check_replicas(plan, tensors, buffers, self._ranks)
            self._compared = True
        root, step = self._save_root.root, common.global_step
        # A number once used is never used again: what failed may be committed all the same.
        self._save_root.sequence += 1
        sequence = self._save_root.sequence

        def make() -> str:
            room = plan.total_bytes - (bytes_of(plan, frozen) if links else 0)
            try:
                self._save_root.check_room(room, step)
                return stage(root, step, self._save_root.attempt, sequence).path
            except SaveError:
                raise
            except OSError as error:
                # Here, so that every rank takes it for a save that failed.
                raise SaveError(f"step {step} could not be saved below {root.path}: {error}") from error

        path = self._ranks.decide(make, "preparing the save", str)
        return SaveJob(
            root=root,
            staging=Staging(root, path, step, self._save_root.attempt, sequence),
            identity=Identity(self._save_root.lineage, sequence, self._save_root.parent, self._save_root.attempt),
            plan=plan,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            prefix=self._config.prefix or "checkpoint",
            files=self._filing.files(plan, tensors, frozen),
            tensors=tensors,
            common=common,
            training=training,
            lock=self._save_root.lock,
            before_commit=self._before_commit,
            warn=lambda text: self._say(f"warning: {text}"),
            peers=self._ranks,
            links=links,
        )

    def _agreed(self, progress: Progress) -> tuple[CommonInfo, dict[str, Any]]:
        """What common.json says, and what the program has kept beside it.

        A rank that has left out a step, or done one more, is not saved as if it were where rank 0 is.
        """
        common, own = CommonInfo(), dict[str, Any]()

        def place() -> list[int]:
            nonlocal common, own
            common, own = progress.common(), to_record(self._training())
            return [common.global_step, common.consumed_samples]

        places = self._ranks.exchange(place, "starting a save")
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is not None:
            told = [f"rank {rank} at step {places[rank][0]} with {places[rank][1]} samples" for rank in (0, other)]
            raise RanksError(
                f"nothing was saved, for the ranks are at different places: {', '.join(told)}",
                hint="call advance() on every rank, with the same numbers",
            )
        return common, own
