"""What ranks that hold different parameters say of their optimizers, as one description of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from perdure.errors import SaveError
from perdure.state.optimizer import OptimizerView

__all__ = ["common_step", "merge_optimizers"]


def common_step(view: OptimizerView) -> list[Any] | None:
    """The step that all parameters here share, with its kind, or None where there is none or they differ."""
    states = [view.optimizer.state[p] for _, p in view.parameters() if p in view.optimizer.state]
    steps = {("exp_avg" in state, _number(state["step"]), type(state["step"]).__name__) for state in states
             if "step" in state}  # fmt: skip
    return list(steps.pop()) if len(steps) == 1 else None


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else repr(value)


def merge_optimizers(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One description from those of all ranks, as `collect_optimizer` makes them.

    Groups with the same settings become one; a parameter has the shared step where any rank says so.

    Raises:
        SaveError: ranks contradict each other, so that no description holds for all.
    """
    first = described[0]
    if all(each == first for each in described):
        return first
    _refuse_contradictions(described)
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    sharing: set[str] = set()
    names: dict[str, None] = {}
    for each in described:
        keys |= each["keys"]
        values |= {key: value for key, value in each["values"].items() if not key.startswith("$")}
        mine = [name for group in each["groups"] for name in group["params"]]
        names |= dict.fromkeys(mine)
        if "$shared_step" in each["values"]:
            values["$shared_step"] = each["values"]["$shared_step"]
            sharing.update(set(mine).difference(each["values"]["$without_step"]))
        for group in each["groups"]:
            same = next((known for known in groups if known["settings"] == group["settings"]), None)
            if same is None:
                same = {"params": [], "settings": group["settings"]}
                groups.append(same)
            same["params"] += [name for name in group["params"] if name not in same["params"]]
    asleep = sorted({name for each in described for name in each.get("dormant", ())})
    if sharing:
        values["$without_step"] = [name for name in names if name not in sharing]
    merged = {**first, "keys": keys, "groups": groups, "values": values}
    return {**merged, "dormant": asleep} if asleep else merged


def _refuse_contradictions(described: Sequence[dict[str, Any]]) -> None:
    """What ranks have in common must be the same on all of them; it is restored on each."""
    said: dict[tuple[str, str], tuple[int, Any]] = {}
    for rank, each in enumerate(described):
        told = {("the optimizer", "type"): each["type"]}
        for group in each["groups"]:
            told |= {(name, key): value for name in group["params"] for key, value in group["settings"].items()}
        told |= {(key, "state"): value for key, value in each["values"].items() if not key.startswith("$")}
        for about, value in told.items():
            other, known = said.setdefault(about, (rank, value))
            if known != value:
                name, key = about
                raise SaveError(
                    f"nothing was saved, for ranks {other} and {rank} contradict each other about {name}: {key} is "
                    f"{str(known)[:80]} and {str(value)[:80]}",
                    hint="make the same optimizer on every rank, and change its settings on all of them alike",
                )
