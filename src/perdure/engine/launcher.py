"""What the environment says of how this process was started: how many ranks there are, and whether they are joined."""

from __future__ import annotations

import math
import os
import threading

from perdure.errors import UsageError

__all__ = ["check_joined", "deadline_told", "launched_ranks", "number_told"]

_SETS = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
_ALONE = "for a run of this process alone: WORLD_SIZE=1"
_LAUNCH = f"several ranks are started with torchrun, which sets {_SETS}; {_ALONE}"
# Launchers that start processes without saying what torch.distributed goes by: number of processes, and which this is.
_OTHERS = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "mpirun": ("PMI_SIZE", "PMI_RANK"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
}


def launched_ranks() -> int:
    """How many ranks the launcher's environment speaks of; 1 without one.

    Raises:
        UsageError: it says only a part of what torchrun sets, or no numbers; or another launcher has started several
            processes that know nothing of each other.
    """
    if "WORLD_SIZE" not in os.environ:
        _refuse_other_launchers()
        return 1
    size = _number("WORLD_SIZE", least=1)
    if size > 1:
        rank = _number("RANK")
        _number("MASTER_PORT")
        if rank >= size or not os.environ.get("MASTER_ADDR"):
            what = f"RANK is {rank}" if rank >= size else "MASTER_ADDR is not set"
            raise UsageError(f"the environment variable WORLD_SIZE is {size}, but {what}", hint=_LAUNCH)
    return size


def check_joined(ranks: int) -> None:
    """That as many ranks as the launcher has started go as one run; `ranks` have joined.

    Raises:
        UsageError: `torch.distributed` is not initialised, so that each would be a run of its own on the same data.
    """
    if ranks == 1 and (launched := launched_ranks()) > 1:
        raise UsageError(
            f"this process is rank {os.environ['RANK']} of {launched} (RANK, WORLD_SIZE), but torch.distributed is not "
            "initialised: each rank would be a run of its own",
            hint=f"call torch.distributed.init_process_group() first, or let `perdure train` do it; {_ALONE}",
        )


def _refuse_other_launchers() -> None:
    if "RANK" in os.environ:
        raise UsageError("the environment variable RANK is set, but WORLD_SIZE is not", hint=_LAUNCH)
    for launcher, (size, rank) in _OTHERS.items():
        count, number = os.environ.get(size, ""), os.environ.get(rank, "")
        # A batch script is task 0 of all that were asked for, and yet alone; srun sets one more word.
        if launcher == "srun" and number == "0" and "SLURM_STEP_NUM_TASKS" not in os.environ:
            continue
        if count.isdecimal() and number.isdecimal() and int(count) > 1:
            raise UsageError(
                f"{launcher} has started {count} processes ({size}={count}, {rank}={number}), but RANK and WORLD_SIZE "
                "are not set: each would be a run of its own",
                hint="let it start torchrun once per node, as examples/slurm/train.sbatch does, or set "
                f"{_SETS} for each process; {_ALONE}",
            )


def deadline_told(name: str, default: float) -> float:
    """The seconds in an environment variable of ours; the default where it is not set.

    Raises:
        UsageError: they are no positive number.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise UsageError(
            f"the environment variable {name}: expected a positive number of seconds, found {text[:80]!r}",
            hint=f"{name}={default:g} is the default",
        )
    return seconds


def number_told(name: str, least: int = 0) -> int | None:
    """The number in an environment variable that a launcher sets; None where it is not set.

    Raises:
        UsageError: it is no number from `least` on.
    """
    return _number(name, least) if name in os.environ else None


def _number(name: str, least: int = 0) -> int:
    text = os.environ.get(name)
    if text is None or not text.isascii() or not text.isdigit() or int(text) < least:
        found = "it is not set" if text is None else f"found {text[:80]!r}"
        raise UsageError(f"the environment variable {name}: expected a number from {least} on, {found}", hint=_LAUNCH)
    return int(text)
