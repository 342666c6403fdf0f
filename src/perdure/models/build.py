"""The `model:` section -> a module: the registered models, or any `nn.Module` by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from perdure.errors import UsageError
from perdure.importing import KeyFaults, accepted_keys, check_keys, resolve, section_keys

__all__ = ["build_model", "computes_in_its_own"]

_REGISTERED = {
    "decoder": "perdure.models.decoder:Decoder",
    "transformers": "perdure.models.transformers:causal_lm",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(section: Any, vocab_size: int | None = None) -> nn.Module:
    """Build the model that a `model:` section describes.

    `type` names a registered model (`decoder`, `transformers`) or an import path of a class or function that returns
    a module; without `type`, `model_type` selects `transformers`. All other keys are passed on by name. `params_dtype`
    and `compute_dtype` go to a constructor that takes them; otherwise floating-point parameters and buffers are
    converted to `params_dtype`, and a `compute_dtype` that differs from it is refused.

    Args:
        section: a mapping or `perdure.config`'s ModelConfig.
        vocab_size: number of token ids of the data; used where the section gives none and the constructor takes one.

    Raises:
        KeyFaults: unknown type, keys that the constructor does not take, or values it refuses.
    """
    values, written = section_keys(section)
    name = values.pop("type", None) or ("transformers" if values.get("model_type") else "decoder")
    values = {key: value for key, value in values.items() if value is not None}
    written = {key for key in written if key in values}
    constructor = _constructor(str(name))
    accepted = accepted_keys(constructor)

    def takes(key: str) -> bool:
        return accepted is None or key in accepted

    # Keys nobody wrote are only defaults of the section: passed where they fit.
    keys = {key: value for key, value in values.items() if key in written or takes(key)}
    fill = vocab_size is not None and takes("vocab_size") and (accepted is not None or name == "transformers")
    if vocab_size is not None and fill and keys.setdefault("vocab_size", vocab_size) < vocab_size:
        text = f"{keys['vocab_size']} is smaller than the {vocab_size} token ids of the data"
        raise KeyFaults([("model.vocab_size", text)])
    dtypes: dict[str, str] = {
        key: str(keys.pop(key)) for key in ("params_dtype", "compute_dtype") if key in keys and not takes(key)
    }
    faults = check_keys(constructor, keys) + _dtype_faults(dtypes, str(name))
    if faults:
        raise KeyFaults([(f"model.{key}", text) for key, text in faults])
    model = constructor(**keys)
    if not isinstance(model, nn.Module):
        raise KeyFaults([("model.type", f"`{name}` gave a {type(model).__name__}, not a torch.nn.Module")])
    return model.to(_DTYPES[dtypes["params_dtype"]]) if "params_dtype" in dtypes else model


def computes_in_its_own(section: Any) -> bool:
    """Whether what a `model:` section names takes a `compute_dtype` that may differ from `params_dtype`.

    Raises:
        KeyFaults: it names nothing.
    """
    values, _ = section_keys(section)
    name = values.get("type") or ("transformers" if values.get("model_type") else "decoder")
    return name != "transformers" and "compute_dtype" in (accepted_keys(_constructor(str(name))) or ())


def _constructor(name: str) -> Callable[..., Any]:
    target = resolve(name, _REGISTERED, key="model.type")
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    if not callable(target):
        raise UsageError(f"model.type: `{name}` is a {type(target).__name__}, which cannot be called")
    return target  # type: ignore[no-any-return]


def _dtype_faults(dtypes: dict[str, str], name: str) -> list[tuple[str, str]]:
    faults = [(key, f"`{value}` is not one of {', '.join(_DTYPES)}") for key, value in dtypes.items()
              if value not in _DTYPES]  # fmt: skip
    compute = dtypes.get("compute_dtype")
    if not faults and compute is not None and compute != dtypes.get("params_dtype", "float32"):
        faults.append(("compute_dtype", f"`{name}` takes no compute_dtype: it computes in params_dtype"))
    return faults
