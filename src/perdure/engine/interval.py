"""How often to save: what a save costs against what a failure loses (Young 1974, Daly 2006)."""

from __future__ import annotations

import math

__all__ = ["best_interval", "steps_between"]


def best_interval(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between saves that lose the least time in the long run.

    Daly's higher-order estimate; when saving costs more than half of what passes between failures, that itself.

    Args:
        cost_s: training time that one save takes away.
        mtbf_s: mean time between failures of the whole job.
    """
    if cost_s >= mtbf_s / 2:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def steps_between(interval_s: float, step_s: float, save_s: float) -> int:
    """The same in steps, at least one; saves never overlap, so that one is over before the next falls due.

    Args:
        step_s: seconds of a step.
        save_s: seconds from a save's start until its commit.
    """
    return max(round(interval_s / step_s), math.ceil(save_s / step_s), 1)
