"""Causal language models of the transformers library, built from configuration keys alone: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from perdure.errors import UsageError
from perdure.importing import KeyFaults, accepted_keys, did_you_mean
from perdure.models.transformers_plan import transformers_plan

__all__ = ["causal_lm"]


def causal_lm(
    model_type: str | None = None,
    *,
    architectures: Sequence[str] | None = None,
    params_dtype: str = "float32",
    compute_dtype: str | None = None,
    **keys: Any,
) -> nn.Module:
    """A freshly initialised model (weights from torch's default generator) that returns an object with `.logits`.

    Args:
        model_type: the library's name of the architecture, such as `llama`.
        architectures: at most one class name, which has to be the one that `model_type` stands for.
        params_dtype: dtype of the parameters; these models compute in it.
        keys: keys of that architecture's configuration class.

    Raises:
        KeyFaults: an architecture or a key that the library does not know, or a `compute_dtype` of its own.
        UsageError: the library is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "model.type: `transformers` needs the transformers package", hint="pip install 'perdure[transformers]'"
        ) from error
    known = transformers.CONFIG_MAPPING
    if model_type is None:
        raise KeyFaults([("model.model_type", "missing, `transformers` requires it, for example `llama`")])
    if model_type not in known:
        raise KeyFaults([("model.model_type", f"unknown `{model_type}`{did_you_mean(model_type, known.keys())}")])
    kind = known[model_type]
    valid = {*(accepted_keys(kind) or ()), *kind().to_dict()}
    faults = [
        (key, f"unknown key, {kind.__name__} does not take it{did_you_mean(key, valid)}")
        for key in keys
        if key not in valid
    ]
    if compute_dtype not in (None, params_dtype):
        faults.append(("compute_dtype", f"`{model_type}` computes in params_dtype ({params_dtype})"))
    if params_dtype not in ("float32", "bfloat16", "float16"):
        faults.append(("params_dtype", f"`{params_dtype}` is not one of float32, bfloat16, float16"))
    if faults:
        raise KeyFaults([(f"model.{key}", text) for key, text in faults])
    try:
        config = kind(**keys)
        # Past keys and values are of use in generation only.
        config.use_cache = False
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=params_dtype)
    except Exception as error:  # its validators raise errors of several libraries
        raise KeyFaults([("model", f"`{model_type}` refuses its configuration: {error}")]) from error
    if architectures and list(architectures) != [type(model).__name__]:
        text = f"`{', '.join(architectures)}` is not what `{model_type}` stands for: {type(model).__name__}"
        raise KeyFaults([("model.architectures", text)])
    # What `perdure.parallel` asks a model for.
    model.tensor_parallel_plan = partial(transformers_plan, model)  # type: ignore[assignment]
    return model.train()
