"""Parameter-group settings: as JSON of their kinds, and back onto live groups by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from perdure.errors import MismatchError, UnsupportedStateError, few
from perdure.state.jsonable import from_json, to_json
from perdure.state.shards import dtype_name

__all__ = ["group_settings", "moved_parameters", "refuse_missing_state", "setting_tensor"]

_MOST_ELEMENTS = 64


def setting_tensor(value: Tensor, where: str) -> Any:
    """A tensor among the settings (a learning rate, say), held inline with its dtype and shape.

    Raises:
        UnsupportedStateError: it is sharded, or too large to be a setting.
    """
    if value.numel() > _MOST_ELEMENTS or hasattr(value, "placements"):
        raise UnsupportedStateError(f"{where}: a tensor of {value.numel()} elements is not a setting")
    listed = value.detach().cpu().flatten().tolist()
    inline = {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "values": listed}
    return {"$tensor": to_json(inline, where, setting_tensor)}


def _read_tensor(inline: Any) -> Tensor:
    read = from_json(inline, _read_tensor, "optimizer: a setting")
    return torch.tensor(read["values"], dtype=getattr(torch, read["dtype"]), device="cpu").reshape(read["shape"])


def group_settings(
    live: Sequence[dict[str, Any]], names: Mapping[int, str], groups: Sequence[Mapping[str, Any]], notes: list[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each live group, the settings that the checkpoint has for its parameters, matched by name.

    Args:
        live: the optimizer's groups.
        names: `id(parameter)` -> name.
        groups: the saved ones: `params` (names) and `settings`.
        notes: receives a line for every set of parameters that changed its company.
    """
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    heirs: dict[int, list[list[str]]] = {}
    for number, group in enumerate(live):
        here = [names[id(p)] for p in group["params"]]
        origins = [home[name] for name in here if name in home]
        sources = sorted(set(origins))
        if len(sources) == 1:
            saved = groups[sources[0]]["settings"]
            read = {k: from_json(v, _read_tensor, f"optimizer: group {number}: {k}") for k, v in saved.items()}
            found.append((group, {k: _placed(v, group.get(k)) for k, v in read.items()}))
            heirs.setdefault(sources[0], []).append(here)
        elif sources:
            main = number if number in sources else max(sources, key=origins.count)
            moved = [name for name in here if home.get(name, main) != main]
            notes.append(
                f"group {number} mixes parameters of {len(sources)} saved groups and keeps its own settings; "
                f"moved here: {few(moved)}"
            )
    for number, parts in heirs.items():
        if len(parts) > 1:
            moved = [name for part in sorted(parts, key=len)[:-1] for name in part]
            notes.append(f"the settings of saved group {number} now hold for {len(parts)} groups; moved: {few(moved)}")
    return found


def refuse_missing_state(
    live: Sequence[dict[str, Any]], names: Mapping[int, str], states: Mapping[int, Mapping[str, Any]], kind: str
) -> None:
    """Looks for settings that were turned on since, and that torch's optimizers would look for a state of.

    Args:
        states: `id(parameter)` -> the state that it is about to have.
        kind: class name of the optimizer.

    Raises:
        MismatchError: there is one; its first step would fail.
    """
    needs = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
    if kind == "RMSprop":
        needs["momentum"] = "momentum_buffer"
    for group in live:
        for setting, key in needs.items():
            without = [names[id(p)] for p in group["params"] if states.get(id(p)) and key not in states[id(p)]]
            if group.get(setting) and without:
                raise MismatchError(
                    f"optimizer: {setting} is {group[setting]} here, and the checkpoint has no {key} for "
                    f"{len(without)} parameters: {few(without)}",
                    hint=f"leave {setting} as it was, or start from the weights only: checkpoint.no_load_optim=True",
                )


def moved_parameters(
    live: Sequence[dict[str, Any]], names: Mapping[int, str], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The parameters that share their group with others than before, by names alone.

    Groups go by their names where both sides have them, else a group stands for the saved one from which most of its
    parameters come.
    """
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    labels = [group.get("settings", {}).get("name") for group in groups]
    moved, heirs = [], set()
    for group in sorted(live, key=lambda group: -len(group["params"])):
        here = [name for p in group["params"] if (name := names.get(id(p), "")) in home]
        if group.get("name") is not None and None not in labels:
            moved += [f"{n} ({labels[home[n]]} -> {group['name']})" for n in here if labels[home[n]] != group["name"]]
            continue
        origins = [home[name] for name in here]
        main = max((o for o in set(origins) if o not in heirs), key=origins.count, default=None)
        if main is not None:
            heirs.add(main)
        moved += [name for name, origin in zip(here, origins, strict=True) if origin != main]
    return sorted(moved)


def _placed(value: Any, live: Any) -> Any:
    """A setting's tensors on the device of those that it replaces."""
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        return value.to(live.device)
    if type(value) in (list, tuple) and type(live) is type(value) and len(live) == len(value):
        return type(value)(_placed(v, old) for v, old in zip(value, live, strict=True))
    return value
