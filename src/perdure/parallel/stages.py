"""A model cut into pipeline stages by layers, every name as in the whole model.

A model says by a method `pipeline_plan()` in which order its modules work: three lists of names, what comes before
the layers, the layers, and what comes after them (an `nn.Sequential` needs none). A stage is the same model without
the modules that it does not hold: an attribute becomes None, an item of a ModuleList, ModuleDict or Sequential is not
met when one iterates. Its `forward` then takes the hidden states of the stage before in place of the model's first
argument.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from perdure.errors import UsageError

__all__ = ["Cut", "cut", "layer_names", "put_tied", "without"]


@dataclass(frozen=True)
class Cut:
    """Which of the planned modules each stage holds.

    Attributes:
        held: for each stage, names of modules.
        tied: sets of parameter names that are one tensor held by several stages.
    """

    held: tuple[tuple[str, ...], ...]
    tied: tuple[tuple[str, ...], ...]

    def absent(self, stages: Collection[int]) -> set[str]:
        """The planned modules that none of these stages holds."""
        mine = {name for stage in stages for name in self.held[stage]}
        return {name for names in self.held for name in names} - mine

    def stages_of(self, parameter: str) -> set[int]:
        """The stages that hold a parameter."""
        return {number for number, names in enumerate(self.held) if _inside(parameter, names)}


def layer_names(model: nn.Module) -> list[str]:
    """The names of the layers that `pipeline_plan` says.

    Raises:
        UsageError: the model has no plan.
    """
    return list(_plan(model)[1])


def cut(model: nn.Module, layers: Sequence[range]) -> Cut:
    """The model by stages that hold these layers; the first also what comes before, the last what comes after.

    Raises:
        UsageError: the model has no plan, or one that leaves parameters out.
    """
    before, names, after = _plan(model)
    held = [[names[index] for index in stage] for stage in layers]
    held[0] = [*before, *held[0]]
    held[-1] = [*held[-1], *after]
    planned = [name for stage in held for name in stage]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    left_out = [name for name in parameters if not _inside(name, planned)]
    if left_out:
        raise UsageError(
            f"parallelism.pipeline_parallel: the plan of {type(model).__name__} leaves out {left_out[0]}"
            + f" and {len(left_out) - 1} more parameters" * (len(left_out) > 1),
            hint="name every module that has parameters in pipeline_plan()",
        )
    result = Cut(tuple(map(tuple, held)), ())
    shared: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared[id(parameter)].append(name)
    tied = [tuple(each) for each in shared.values() if len({s for n in each for s in result.stages_of(n)}) > 1]
    return Cut(result.held, tuple(tied))


def _plan(model: nn.Module) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    method = getattr(model, "pipeline_plan", None)
    if method is None and isinstance(model, nn.Sequential):
        return [], list(model._modules), []
    if method is None:
        raise UsageError(
            f"parallelism.pipeline_parallel: {type(model).__name__} has no plan for it",
            hint="give the model a method pipeline_plan() that names its modules in the order in which they work: "
            "(before the layers, the layers, after the layers)",
        )
    before, names, after = method()
    for name in (*before, *names, *after):
        try:
            model.get_submodule(name)
        except AttributeError:
            raise UsageError(
                f"parallelism.pipeline_parallel: pipeline_plan() of {type(model).__name__} names {name!r}, "
                "which is none of its modules"
            ) from None
    return before, names, after


def without(model: nn.Module, absent: Collection[str]) -> nn.Module:
    """A model that shares all modules with `model` but lacks some; nothing of `model` changes."""
    made = _shallow(model)
    inner: dict[str, set[str]] = defaultdict(set)
    for name in absent:
        head, _, rest = name.partition(".")
        if rest:
            inner[head].add(rest)
        elif isinstance(made, nn.ModuleDict | nn.ModuleList | nn.Sequential):
            # Iterating goes over what is there, under the keys that it has in the whole model.
            del made._modules[head]
        else:
            made._modules[head] = None
    for head, names in inner.items():
        child = made._modules[head]
        assert child is not None
        made._modules[head] = without(child, names)
    return made


def put_tied(container: nn.Module, whole: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> None:
    """Makes `parameter` known by all of `names` in what a rank holds, as it is in the whole model.

    So it is saved, and counted in the optimizer, under the same first name on every rank that holds it.
    """
    for name in names:
        path, _, own = name.rpartition(".")
        parent = container.get_submodule(path.rpartition(".")[0])
        last = path.rpartition(".")[2]
        if parent._modules.get(last) is None:
            kept = _shallow(whole.get_submodule(path))
            kept._modules, kept._buffers, kept._parameters = {}, {}, {}
            order = whole.get_submodule(path.rpartition(".")[0])._modules
            parent._modules = {
                key: kept if key == last else parent._modules[key]
                for key in order
                if key == last or key in parent._modules
            }
        container.get_submodule(path)._parameters[own] = parameter


def _shallow(module: nn.Module) -> nn.Module:
    """The same module as another object: modules and hooks in tables of its own, the same parameters and buffers."""
    made = module.__new__(type(module))
    shared = ("_parameters", "_buffers", "_non_persistent_buffers_set")
    made.__dict__.update(
        (key, value.copy() if key.startswith("_") and key not in shared and isinstance(value, dict) else value)
        for key, value in module.__dict__.items()
    )
    return made


def _inside(parameter: str, modules: Collection[str]) -> bool:
    return any(parameter.startswith(f"{name}.") for name in modules)
