"""The beginning and the end of a job of several ranks: all come together, and all leave together.

The process group is made here and not by torch's `env://`, because that one cannot say who is missing,
and because a launcher's restart finds the keys of the start before in the launcher's store.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from perdure.engine import ranks
from perdure.engine.watch import Phase, Watch
from perdure.errors import PerdureError, RanksError

__all__ = ["end_process", "join", "leave_together"]

_LAST_S = 5.0


def join(deadline_s: float = ranks.DEADLINE_S) -> None:
    """Makes the process group that the launcher's environment describes, watched from the first moment on.

    Raises:
        RanksError: rank 0's store cannot be opened or reached, or ranks are missing after the deadline; they are named.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=deadline_s)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(serve: bool) -> Any:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                address, port, size, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=serve
            )
        except (RuntimeError, OSError, MemoryError) as error:
            cause = " ".join(str(error).split())[:200]
            if serve:
                raise RanksError(
                    f"rank 0 could not open the store of the job at {address}:{port}: {cause}",
                    hint="MASTER_PORT names a port that nobody else may hold; `ulimit -a` shows what it may open",
                ) from error
            raise RanksError(
                f"rank {rank} could not reach rank 0's store at {address}:{port} within {deadline_s:g} s: {cause}",
                hint="is that host up, and the port open? MASTER_ADDR and MASTER_PORT name it (torchrun sets them)",
            ) from error

    store = connect(rank == 0 and not by_launcher)
    prefix = _same_start(store, rank, size, deadline_s)
    phase = Phase()
    watch = Watch(
        c10d.PrefixStore(f"{prefix}/watch", connect(False)),
        rank,
        size,
        phase,
        deadline_s=deadline_s,
        neighbours=ranks.neighbours(rank, size),
        joined=True,
        serves=rank == 0 and not by_launcher,
    )
    ranks.adopt(watch)
    try:
        _wait_for_all(store, prefix, rank, size, watch, deadline_s)
        # Groups made later, of a mesh say, take these: half an hour otherwise, whatever the first one has.
        c10d.default_pg_timeout = timeout
        c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        phase.set("joining the other ranks")
        dist.init_process_group(
            backend, store=c10d.PrefixStore(prefix, store), rank=rank, world_size=size, timeout=timeout
        )
    except BaseException as error:
        told = error.message if isinstance(error, PerdureError) else f"{type(error).__name__}: {error}"
        watch.fail(f"rank {rank} failed while joining the other ranks: {' '.join(told.split())[:500]}")
        raise


def _same_start(store: Any, rank: int, size: int, deadline_s: float) -> str:
    """A prefix of keys that only the ranks of this start use, in a store that may hold those of starts before.

    Every rank says hello with a word of its own; rank 0, which counts the starts, answers that very word.
    """
    end = time.monotonic() + deadline_s
    mine = os.urandom(8).hex()
    if rank == 0:
        prefix = f"perdure/{store.add('perdure/starts', 1)}"
        pending, answered = set(range(1, size)), dict[int, str]()
        while pending and time.monotonic() < end:
            for other in sorted(pending):
                key = f"perdure/hello/{other}"
                if store.check([key]) and (word := store.get(key).decode()) != answered.get(other):
                    store.set(f"perdure/welcome/{word}", prefix)
                    answered[other] = word
                if store.check([f"{prefix}/here/{other}"]):
                    pending.discard(other)
            time.sleep(0.02)
        return prefix
    store.set(f"perdure/hello/{rank}", mine)
    while not store.check([f"perdure/welcome/{mine}"]):
        if time.monotonic() > end:
            raise RanksError(
                f"rank 0 did not join within {deadline_s:g} s", hint="look at the first error of rank 0 and its host"
            )
        time.sleep(0.02)
    prefix = str(store.get(f"perdure/welcome/{mine}").decode())
    store.set(f"{prefix}/here/{rank}", "1")
    return prefix


def _wait_for_all(store: Any, prefix: str, rank: int, size: int, watch: Watch, deadline_s: float) -> None:
    """Rank 0 has waited; the others take its word that all are here.

    Raises:
        RanksError: somebody is missing, named.
    """
    if rank == 0:
        missing = [r for r in range(1, size) if not store.check([f"{prefix}/here/{r}"])]
        if not missing:
            store.set(f"{prefix}/all", "1")
            return
        who = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        raise RanksError(
            f"rank{'s' * (len(missing) > 1)} {who} did not join within {deadline_s:g} s",
            hint="look at the first error of these ranks and their hosts",
        )
    end = time.monotonic() + deadline_s + _LAST_S  # rank 0, which knows who is missing, is to be the first to give up
    while not store.check([f"{prefix}/all"]):
        watch.check()
        if time.monotonic() > end:
            raise RanksError(f"rank 0 did not begin within {deadline_s:g} s of this rank's joining it")
        time.sleep(0.02)


def leave_together() -> None:
    """Ends the process group when every rank is done: one that goes early tears connections that others still use.

    Raises:
        RanksError: another rank failed at its end.
    """
    watch = ranks.present_watch()
    if watch is None or not dist.is_initialized():
        return
    watch.phase.set("leaving")
    store = c10d._get_default_store()
    store.add("left", 1)
    end = time.monotonic() + watch.deadline_s
    while int(store.add("left", 0)) < watch.size:
        watch.check()
        if time.monotonic() > end:
            raise RanksError(f"the other ranks did not end within {watch.deadline_s:g} s: {'; '.join(watch.missing())}")
        time.sleep(0.02)
    watch.leave()
    dist.destroy_process_group()
    # Where rank 0 holds the store itself, it goes last.
    with contextlib.suppress(RuntimeError):
        store.add("gone", 1)
        end = time.monotonic() + _LAST_S
        while watch.rank == 0 and int(store.add("gone", 0)) < watch.size and time.monotonic() < end:
            time.sleep(0.02)


def end_process(code: int) -> None:
    """Ends a rank, if this process is one, without running C++'s destructors; returns if it is none.

    Threads of process groups may still be at work when statics are destroyed, which aborts now and then.
    """
    if ranks.present_watch() is None:
        return
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
