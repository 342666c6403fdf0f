"""The `optimizer:` section and a model -> an optimizer with named parameter groups.

Groups are decided by parameter names: `decay` and `no_decay` (and `muon …` / `adamw …`, and a factor on the learning
rate where asked for). Every group carries `name` and `param_names`, fully qualified and without wrapper prefixes, so
that state can be matched by name. Only parameters that require gradients are included: one that is frozen is not the
optimizer's, and an unfrozen one comes in with the optimizer of the next start.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perdure.errors import PerdureError, UsageError
from perdure.importing import KeyFaults, accepted_keys, check_keys, resolve, section_keys
from perdure.optim.masters import MixedPrecisionOptimizer, needs_master

__all__ = ["build_optimizer", "decays", "suits_muon", "trainable_parameters"]

_DEFAULTS: dict[str, Any] = {"type": "AdamW", "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def build_optimizer(section: Any, model: nn.Module, lr: float, *, master_weights: bool = True) -> torch.optim.Optimizer:
    """Build the optimizer that an `optimizer:` section describes.

    `type` is any class of `torch.optim` (`Muon` is Muon for the matrices and AdamW for the rest) or an import path.
    Keys are passed to its constructor. Of the defaults `betas: [0.9, 0.95]`, `eps: 1e-8` and `weight_decay: 0.01`, a
    class gets those it takes (`eps` only beside `betas`: elsewhere it means other things); what was written is always
    passed, or refused.

    Keys that are ours: `weight_decay_include`, `weight_decay_exclude` (patterns, see `decays`), `lr_scale` (a mapping
    of patterns to factors on the learning rate, the first match counts; kept as the group's `lr_ratio`) and
    `adamw_include` (patterns of matrices that Muon leaves to AdamW).

    Args:
        section: a mapping or `perdure.config`'s OptimizerConfig.
        model: bare or wrapped (DistributedDataParallel, torch.compile, FSDP).
        lr: the rate that the groups start with, times their `lr_ratio` where they have one.
        master_weights: keep FP32 masters of bfloat16 and float16 parameters (`MixedPrecisionOptimizer`).

    Raises:
        KeyFaults: unknown type, keys that the class does not take, settings it refuses.
        UsageError: the model has nothing to train.
    """
    values, written = section_keys(section)
    values = {**_DEFAULTS, **{key: value for key, value in values.items() if value is not None}}
    written = {key for key in written if key in values}
    name = str(values.pop("type"))
    patterns = {key: _patterns(key, values.pop(key, ())) for key in ("weight_decay_include", "weight_decay_exclude")}
    scales = _scales(values.pop("lr_scale", {}))
    to_adamw = _patterns("adamw_include", values.pop("adamw_include", ())) if name == "Muon" else ()
    constructor = _constructor(name)
    settings = _settings(constructor, values, written - {"type", "lr_scale", "adamw_include", *patterns})
    takes_decay = "weight_decay" in settings
    if not takes_decay and any(patterns.values()):
        key = next(key for key, value in patterns.items() if value)
        raise KeyFaults([(f"optimizer.{key}", f"`{name}` takes no weight_decay")])

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[str, dict[str, Any]] = {}
    for parameter_name, parameter in trainable_parameters(model):
        extra: dict[str, Any] = {}
        words = []
        if name == "Muon":
            matrix = suits_muon(parameter_name, parameter, id(parameter) in embeddings)
            extra["algorithm"] = "muon" if matrix and not _matches(to_adamw, parameter_name) else "adamw"
            words.append(extra["algorithm"])
        if takes_decay:
            decay = decays(parameter_name, parameter, *patterns.values())
            extra["weight_decay"] = settings["weight_decay"] if decay else 0.0
            words.append("decay" if decay else "no_decay")
        factor = next((factor for pattern, factor in scales if _matches((pattern,), parameter_name)), None)
        if factor is not None:
            extra |= {"lr_ratio": factor, "lr": lr * factor}
            words.append(f"lr×{factor:g}")
        label = " ".join(words) or "all"
        group = groups.setdefault(label, {"params": [], "param_names": [], "name": label, **extra})
        group["params"].append(parameter)
        group["param_names"].append(parameter_name)
    if not groups:
        raise UsageError("the model has no parameter that requires a gradient", hint="unfreeze something to train it")

    construct = partial(_construct, constructor, name, lr, settings)
    ordered = [groups[label] for label in sorted(groups)]
    if master_weights and any(needs_master(each) for group in ordered for each in group["params"]):
        # DistributedDataParallel reduces p.grad after hooks have run, so there they would take it too early.
        return MixedPrecisionOptimizer(ordered, construct, hooks=not isinstance(model, DistributedDataParallel))
    return construct(ordered)


def decays(name: str, parameter: Tensor, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> bool:
    """Whether weight decay applies to a parameter.

    A pattern is a glob when it holds any of `*?[`, else a substring (so a whole name matches itself). A match in
    `include` says yes; else one in `exclude` says no; else no for biases and for vectors and scalars.
    """
    if _matches(include, name):
        return True
    if _matches(exclude, name):
        return False
    return parameter.ndim > 1 and name.rpartition(".")[2] != "bias"


def suits_muon(name: str, parameter: Tensor, is_embedding: bool) -> bool:
    """Whether Muon's orthogonalised updates make sense for a parameter: a matrix between hidden states, neither an
    embedding nor an output layer (known by name: `lm_head`, `output`, `output_layer`, `head`, `classifier`)."""
    owner = name.rpartition(".")[0].rpartition(".")[2]
    outputs = ("lm_head", "output", "output_layer", "head", "classifier")
    return parameter.ndim == 2 and not is_embedding and owner not in outputs


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names, without wrapper prefixes, and parameters that require a gradient; a shared one once, by its first name."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = []
    for name, parameter in bare.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            found.append((name, parameter))
    return found


def _constructor(name: str) -> Callable[..., Any]:
    registered: dict[str, Callable[..., Any]] = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if name == "LBFGS":
        raise KeyFaults([("optimizer.type", "LBFGS evaluates the loss several times a step and is not supported")])
    if "Muon" in registered:  # torch has it since 2.9
        from perdure.optim.muon import MuonWithAdamW

        registered["Muon"] = MuonWithAdamW
    constructor = resolve(name, registered, key="optimizer.type")
    if not callable(constructor):
        raise KeyFaults([("optimizer.type", f"`{name}` is a {type(constructor).__name__}, which cannot be called")])
    return constructor  # type: ignore[no-any-return]


def _settings(constructor: Callable[..., Any], values: dict[str, Any], written: set[str]) -> dict[str, Any]:
    """What to pass to the constructor: everything written, and the defaults that it takes."""
    accepted = accepted_keys(constructor)

    def suits(key: str) -> bool:
        if accepted is None or key not in accepted:
            return False
        default = accepted[key].default
        if key == "eps":
            return "betas" in accepted and not isinstance(default, tuple)
        return key != "betas" or not isinstance(default, tuple) or len(default) == len(values["betas"])

    keys = {key: value for key, value in values.items() if key in written or suits(key)}
    first = next(iter(inspect.signature(constructor).parameters))
    faults = [
        (key, "the learning rate is set by lr_scheduler.learning_rate" if key == "lr" else text)
        for key, text in check_keys(constructor, keys, supplied=(first, "lr"))
    ]
    if faults:
        raise KeyFaults([(f"optimizer.{key}", text) for key, text in faults])
    return {key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()}


def _construct(
    constructor: Callable[..., Any], name: str, lr: float, settings: dict[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    accepted = accepted_keys(constructor)
    rate = {"lr": lr} if accepted is None or "lr" in accepted else {}
    try:
        optimizer = constructor(groups, **rate, **settings)
    except PerdureError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise KeyFaults([("optimizer", f"`{name}` refuses its settings: {error}")]) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise KeyFaults(
            [("optimizer.type", f"`{name}` gave a {type(optimizer).__name__}, not a torch.optim.Optimizer")]
        )
    return optimizer


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name
        for pattern in patterns
    )


def _patterns(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value):
        return tuple(value)
    raise KeyFaults([(f"optimizer.{key}", f"{value!r} is not a list of name patterns")])


def _scales(value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict) and all(
        isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor >= 0 for factor in value.values()
    ):
        return [(str(pattern), float(factor)) for pattern, factor in value.items()]
    raise KeyFaults([("optimizer.lr_scale", f"{value!r} does not map name patterns to factors >= 0")])
