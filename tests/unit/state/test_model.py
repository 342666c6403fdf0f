"""A model's tensors go by the names that the model gives them, whatever is wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from perdure.errors import UnsupportedStateError
from perdure.format.box import Box
from perdure.state.model import extra_states, model_tensors, parameter_names, refuse_hidden


class Odd(nn.Module):
    """Submodules called like wrappers' attributes, shared modules, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 2, bias=False)
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("thrown", torch.arange(4), persistent=False)
        self.register_parameter("none", None)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self._orig_mod(self.module(x))) * self.scale


def compiled(model: nn.Module) -> nn.Module:
    """torch.compile's wrapper; the backend doesn't matter to names."""
    wrapped: nn.Module = torch.compile(model, backend="eager")
    return wrapped


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names(model: nn.Module) -> list[str]:
    return [t.name for t in model_tensors(model)]


def test_names_are_those_of_the_state_dict() -> None:
    model = Odd()
    assert set(names(model)) == set(model.state_dict())
    assert "kept" in names(model)
    assert "thrown" not in names(model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        nn.DataParallel,
        compiled,
        checkpoint_wrapper,
        lambda m: compiled(DistributedDataParallel(m)),
        lambda m: DistributedDataParallel(compiled(m)),
        lambda m: compiled(checkpoint_wrapper(DistributedDataParallel(m))),
    ],
    ids=["ddp", "dp", "compile", "checkpoint", "compile-ddp", "ddp-compile", "three"],
)
def test_wrappers_leave_no_trace(wrap: Any) -> None:
    bare = Odd()
    before, parameters = names(bare), parameter_names(bare)
    wrapped = wrap(bare)
    assert names(wrapped) == before
    assert parameter_names(wrapped) == parameters
    assert set(parameters.values()) == {n for n, _ in bare.named_parameters()}


def test_wrapped_submodules_leave_no_trace() -> None:
    bare = Odd()
    before = names(bare)
    bare.inner[0] = checkpoint_wrapper(bare.inner[0])
    bare.module = compiled(bare.module)
    assert names(bare) == before


def test_flattened_parameters_are_refused() -> None:
    """FSDP1 itself needs an accelerator, so its name stands in."""
    flattening = type("FullyShardedDataParallel", (nn.Sequential,), {})
    with pytest.raises(UnsupportedStateError, match="flattens its parameters"):
        model_tensors(nn.Sequential(flattening(nn.Linear(2, 2))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head


def test_a_tied_weight_is_there_once_with_its_aliases() -> None:
    (tensor,) = model_tensors(Tied())
    assert tensor.name == "embedding.weight"
    assert tensor.aliases == ("head.weight", "again.weight")
    assert set(parameter_names(Tied()).values()) == {"embedding.weight"}


def test_two_parameters_of_the_same_memory_are_tied() -> None:
    model = nn.ParameterDict()
    memory = torch.randn(4, 4)
    model["a"], model["b"], model["turned"] = nn.Parameter(memory), nn.Parameter(memory), nn.Parameter(memory.t())
    found = {t.name: t.aliases for t in model_tensors(model)}
    assert found == {"a": ("b",), "turned": ()}


def test_empty_tensors_are_never_tied_by_address() -> None:
    model = nn.ParameterDict({"a": torch.empty(0, 3), "b": torch.empty(0, 3)})
    assert names(model) == ["a", "b"]


def test_views_of_one_buffer_keep_their_own_names_and_shapes() -> None:
    base = torch.randn(100, 3)
    model = nn.Module()
    model.register_buffer("first", base[:10])
    model.register_buffer("overlapping", base[5:15])
    found = {t.name: (t.shape, t.pieces[0].tensor.data_ptr()) for t in model_tensors(model)}
    assert found == {
        "first": ((10, 3), base.data_ptr()),
        "overlapping": ((10, 3), base[5:].data_ptr()),
    }


def test_pieces_share_the_models_memory() -> None:
    model = nn.Linear(2, 3)
    for tensor in model_tensors(model):
        (piece,) = tensor.pieces
        assert piece.box == Box((0,) * len(tensor.shape), tensor.shape)
        piece.tensor.zero_()
    assert not any(p.any() for p in model.parameters())


class Twice(Tensor):
    """A tensor that keeps its values elsewhere."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Twice:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantized"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.empty(3, dtype=torch.bits8), "bits8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.ones(3).to_mkldnn(), "mkldnn"),
        (lambda: Twice(torch.ones(3)), "Twice"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negated"),
        (lambda: nn.UninitializedParameter(), "initialised"),
        (lambda: nn.UninitializedBuffer(), "initialised"),
    ],
    ids=[
        "coo",
        "csr",
        "quantized",
        "meta",
        "bits8",
        "nested",
        "jagged",
        "mkldnn",
        "subclass",
        "conj",
        "neg",
        "lazy",
        "lb",
    ],
)
def test_what_cannot_be_held_is_refused_by_name(make: Any, why: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    tensor = make()
    if isinstance(tensor, nn.Parameter):
        model[1].register_parameter("troublemaker", tensor)
    else:
        model[1].register_buffer("troublemaker", tensor)
    with pytest.raises(UnsupportedStateError, match=why) as caught:
        model_tensors(model)
    assert "1.troublemaker" in str(caught.value)
    assert caught.value.hint


def test_a_name_that_is_no_text_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("\ud800", torch.ones(1))
    with pytest.raises(UnsupportedStateError, match="Unicode"):
        model_tensors(model)


@pytest.mark.timeout(20)
def test_a_module_that_contains_itself_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].parent = model
    with pytest.raises(UnsupportedStateError, match=r"0\.parent"):
        model_tensors(model)


def test_extra_states_are_found_by_name() -> None:
    class Counting(nn.Module):
        def get_extra_state(self) -> int:
            return 3

    model = nn.Sequential(nn.Linear(1, 1), Counting())
    assert list(extra_states(model)) == ["1._extra_state"]


class Hiding(nn.Linear):
    """Keeps a number in its `state_dict` alone, as quantized layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.ones(1)


def test_state_that_only_a_state_dict_holds_is_refused() -> None:
    refuse_hidden(Odd())
    with pytest.raises(UnsupportedStateError, match=r"'1\.scale' cannot be saved: Hiding keeps it neither"):
        refuse_hidden(nn.Sequential(nn.Linear(2, 2), Hiding(2, 2)))
