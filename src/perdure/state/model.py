"""The tensors of a module by fully qualified name, without what wrappers put in front."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from perdure.errors import UnsupportedStateError
from perdure.state.shards import NamedTensor, describe, is_plain

__all__ = [
    "extra_states",
    "frozen_and_buffers",
    "live_tensors",
    "model_tensors",
    "named_modules",
    "named_parameters",
    "parameter_names",
    "refuse_hidden",
    "reshard",
]

# Wrapper class -> attribute of what it wraps, by name, so that none of them need be imported; a class made from one,
# as `fully_shard` makes it, wraps in the same way.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
# Its parameters are cuts of a flat buffer that do not say where they belong.
_FLATTENING = "FullyShardedDataParallel"


@cache
def _inside(kind: type) -> str:
    """The attribute under which modules of a class have what they wrap, or ""."""
    names = [each.__name__ for each in kind.__mro__]
    if _FLATTENING in names:
        raise UnsupportedStateError(
            f"model: {_FLATTENING} flattens its parameters, which leaves their names and places unknown",
            hint="shard with torch.distributed.fsdp.fully_shard (FSDP2), which keeps both",
        )
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), "")


def _unwrap(module: nn.Module) -> nn.Module:
    while True:
        kind: Any = type(module)
        inner = getattr(module, _inside(kind), None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every occurrence of every module (a shared one under each of its names), wrappers looked through.

    Raises:
        UnsupportedStateError: a module contains itself, so that its tensors have no end of names.
    """
    stack: list[tuple[str, nn.Module, tuple[int, ...]]] = [("", _unwrap(model), ())]
    while stack:
        prefix, module, above = stack.pop()
        if id(module) in above:
            raise UnsupportedStateError(
                f"model: {prefix[:-1][:300]!r} contains itself",
                hint="keep the reference to a parent module out of the modules: in a list, or by weakref",
            )
        yield prefix, module
        above = (*above, id(module))
        children = [
            (prefix + name + ".", _unwrap(child), above) for name, child in module._modules.items() if child is not None
        ]
        stack.extend(reversed(children))


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and persistent buffer, in the module's order."""
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two names of the same memory seen in the same way."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return (id(tensor),)
    address = tensor.data_ptr()
    return (address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if address else (id(tensor),)


def model_tensors(model: nn.Module, *, values: bool = True) -> list[NamedTensor]:
    """Parameters and persistent buffers; a tensor known by several names appears once, with its aliases.

    Args:
        values: False also takes a model on the meta device, for what it would hold.

    Raises:
        UnsupportedStateError: one of them cannot be held in a checkpoint.
    """
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in _named(model):
        canonical = first.setdefault(_identity(tensor), name)
        if canonical == name:
            tensors[name] = tensor
            aliases[name] = []
        else:
            aliases[canonical].append(name)
    return [describe("model", name, t, tuple(aliases[name]), values=values) for name, t in tensors.items()]


def frozen_and_buffers(model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """The names, as `model_tensors` gives them, of parameters that require no gradient, and of buffers."""
    frozen, buffers = set(), set()
    for name, tensor in live_tensors(model).items():
        if not isinstance(tensor, nn.Parameter):
            buffers.add(name)
        elif not tensor.requires_grad:
            frozen.add(name)
    return frozenset(frozen), frozenset(buffers)


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names of `model_tensors`, each once."""
    first: dict[tuple[object, ...], str] = {}
    return {name: tensor for name, tensor in _named(model) if first.setdefault(_identity(tensor), name) == name}


def named_parameters(model: nn.Module) -> list[tuple[nn.Parameter, str]]:
    """Every parameter once, with its first fully qualified name: the name that optimizer state goes by."""
    found: dict[int, tuple[nn.Parameter, str]] = {}
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (parameter, prefix + name))
    return list(found.values())


def parameter_names(model: nn.Module) -> dict[int, str]:
    """`id(parameter)` -> its name as `named_parameters` gives it."""
    return {id(parameter): name for parameter, name in named_parameters(model)}


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep state of their own by `get_extra_state`, by name."""
    return {
        prefix + "_extra_state": module
        for prefix, module in named_modules(model)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


@cache
def _is_sharding(kind: type) -> bool:
    """Whether `fully_shard` made a class; by name, since importing FSDP2 takes half a second."""
    return any(each.__name__ == "FSDPModule" for each in kind.__mro__)


def refuse_hidden(model: nn.Module) -> None:
    """Looks for state that a module puts into its `state_dict` by itself.

    Raises:
        UnsupportedStateError: there is some; it would be lost.
    """
    usual = nn.Module._save_to_state_dict
    # Names are put together only where there is something to look at.
    if all(type(module)._save_to_state_dict is usual for module in model.modules()):
        return
    for prefix, module in named_modules(model):
        if type(module)._save_to_state_dict is usual:
            continue
        found: dict[str, Any] = {}
        module._save_to_state_dict(found, "", True)
        known = {*module._parameters, *module._buffers, "_extra_state"}
        hidden = next((key for key in found if key not in known), None)
        if hidden is not None:
            raise UnsupportedStateError(
                f"model: {prefix + hidden!r} cannot be saved: {type(module).__name__} keeps it neither as a parameter "
                "nor as a buffer",
                hint="make it a buffer, or give the module get_extra_state() and set_extra_state()",
            )


def reshard(model: nn.Module) -> None:
    """Puts FSDP2's parameters back into shards where a forward pass without a backward one has left them gathered.

    What the modules hold until then are not the parameters that are trained.
    """
    for module in model.modules():
        kind: Any = type(module)
        if _is_sharding(kind):
            module.reshard()  # type: ignore[operator]
