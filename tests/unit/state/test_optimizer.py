"""Optimizer state goes by parameter names, comes back in value and kind, and no optimizer is ever stepped for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

from perdure.errors import MismatchError, UnsupportedStateError
from perdure.format.metadata import TensorRecord
from perdure.format.optimizer import description_fault
from perdure.optim.masters import MixedPrecisionOptimizer
from perdure.optim.muon import MuonWithAdamW
from perdure.state.model import parameter_names
from perdure.state.optimizer import MASTER, OptimizerView, collect_optimizer
from perdure.state.optimizer_restore import OptimizerRestore, prepare_optimizer


class Saved:
    """An optimizer's state as a checkpoint holds it: JSON that went through bytes, copies of tensors, records."""

    def __init__(self, view: OptimizerView) -> None:
        described, tensors = collect_optimizer(view)
        self.described: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(described))
        self.values = {t.name: [p.tensor.clone() for p in t.pieces] for t in tensors}
        self.records = {t.name: TensorRecord(t.dtype, t.shape, [], t.logical) for t in tensors}
        assert len(self.values) == len(tensors)
        assert description_fault(self.described, self.records) is None

    def prepare(self, view: OptimizerView, restore_settings: bool = True) -> OptimizerRestore:
        return prepare_optimizer(view, self.described, self.records, restore_settings=restore_settings)

    def load(self, view: OptimizerView, restore_settings: bool = True) -> OptimizerRestore:
        restore = self.prepare(view, restore_settings)
        with torch.no_grad():
            for target in restore.targets:
                for piece, value in zip(target.pieces, self.values[target.name], strict=True):
                    piece.tensor.copy_(value)
        restore.install()
        return restore


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))


def view_of(net: nn.Module, optimizer: Optimizer) -> OptimizerView:
    return OptimizerView(optimizer, parameter_names(net))


def train(net: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        dtype = next(net.parameters()).dtype
        net(torch.randn(5, 4, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(net: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    names = parameter_names(net)
    return {names[id(p)]: dict(s) for p, s in optimizer.state.items() if s}


def assert_same(a: Any, b: Any) -> None:
    """Equal in value and kind at every depth."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def never_step(optimizer: Optimizer) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the optimizer was stepped")

    optimizer.step = refuse  # type: ignore[method-assign,assignment]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW-tensor-lr": lambda p: AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "AdamW-fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "Adam-amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True, betas=(0.8, 0.9)),
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD-momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2),
    "NAdam": lambda p: NAdam(p, lr=1e-2),
}


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_and_settings_come_back_and_the_next_steps_are_the_same(
    make: Callable[[Any], Optimizer], steps: int
) -> None:
    net = model()
    optimizer = make(net.parameters())
    train(net, optimizer, steps)
    saved = Saved(view_of(net, optimizer))

    other = copy.deepcopy(net)
    fresh = make(other.parameters())
    plain_step = fresh.step
    never_step(fresh)
    restore = saved.load(view_of(other, fresh))
    fresh.step = plain_step  # type: ignore[method-assign]
    assert restore.notes == []
    assert restore.fresh == []
    assert_same(state_of(other, fresh), state_of(net, optimizer))
    assert_same(settings_of(fresh), settings_of(optimizer))
    assert fresh.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()

    train(net, optimizer)
    train(other, fresh)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_names_are_those_of_the_format() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert set(Saved(view_of(net, optimizer)).records) == {
        *("adam_m.0.weight", "adam_v.0.weight", "adam_m.1.weight", "adam_v.1.weight", "adam_step"),
    }


def test_steps_that_differ_are_stored_one_by_one() -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    train(net, optimizer, 1)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    optimizer.step()
    saved = Saved(view_of(net, optimizer))
    assert "adam_step" not in saved.records
    assert "adam_step.0.weight" in saved.records
    other = model()
    fresh = AdamW(other.parameters())
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor(3), 2**70, True, None, numpy.float64(3)])
@pytest.mark.parametrize("shared", [True, False])
def test_a_step_keeps_its_kind(step: Any, shared: bool) -> None:
    net = model()
    optimizer = SGD(net.parameters())
    for number, parameter in enumerate(net.parameters()):
        own = step if shared or number else type(step)() if step is not None and not isinstance(step, Tensor) else 9
        optimizer.state[parameter] = {"step": copy.deepcopy(own), "momentum_buffer": None}
    saved = Saved(view_of(net, optimizer))
    fresh = SGD((other := model()).parameters())
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))


@pytest.mark.parametrize("state", [{"step": 5}, {"step": torch.tensor(5.0), "x": torch.ones(7)}, {"x": 1}])
def test_a_parameter_that_never_got_a_gradient_has_no_state_and_gets_none(state: dict[str, Any]) -> None:
    net = model()
    optimizer = SGD(net.parameters())
    for parameter in list(net.parameters())[:3]:
        optimizer.state[parameter] = copy.deepcopy(state)
    saved = Saved(view_of(net, optimizer))
    assert len(optimizer.state) == 3
    other = model()
    fresh = SGD(other.parameters())
    for parameter in other.parameters():
        fresh.state[parameter] = {"left": "over"}
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))
    assert len(fresh.state) == 3


def test_any_value_in_a_state_comes_back_tensors_within_it_too() -> None:
    net = model()
    optimizer = SGD(net.parameters())
    history = [torch.randn(100), (torch.ones(2, dtype=torch.bfloat16), None)]
    for parameter in net.parameters():
        optimizer.state[parameter] = {
            "history": copy.deepcopy(history),
            "array": numpy.arange(80.0),
            "z": torch.ones(3, dtype=torch.complex64),
            "flags": {"a": (1, None)},
        }
    saved = Saved(view_of(net, optimizer))
    fresh = SGD((other := model()).parameters())
    restore = saved.load(view_of(other, fresh))
    assert restore.notes == []
    for mine, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert numpy.array_equal(mine.pop("array"), theirs.pop("array"))
        assert_same(mine, theirs)


def test_lbfgs_with_its_history_comes_back() -> None:
    net = model()

    def run(net: nn.Module, optimizer: Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = net(torch.ones(5, 4)).square().mean()
            loss.backward()
            return loss  # type: ignore[no-any-return]

        optimizer.step(closure)  # type: ignore[arg-type]

    optimizer = LBFGS(net.parameters(), max_iter=3)
    run(net, optimizer)
    saved = Saved(view_of(net, optimizer))
    fresh = LBFGS((other := copy.deepcopy(net)).parameters(), max_iter=3)
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))
    run(net, optimizer)
    run(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_muon_and_adamw_side_by_side() -> None:
    def build(net: nn.Module) -> Optimizer:
        hidden = [p for p in net.parameters() if p.dim() == 2]
        rest = [p for p in net.parameters() if p.dim() != 2]
        return MuonWithAdamW([{"params": hidden, "algorithm": "muon"}, {"params": rest, "algorithm": "adamw"}], lr=1e-2)

    net = model()
    optimizer = build(net)
    train(net, optimizer)
    saved = Saved(view_of(net, optimizer))
    other = copy.deepcopy(net)
    fresh = build(other)
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))
    assert_same(settings_of(fresh), settings_of(optimizer))
    train(net, optimizer)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_muon_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = Muon(net.parameters())
    train(net, optimizer)
    saved = Saved(view_of(net, optimizer))
    fresh = Muon((other := copy.deepcopy(net)).parameters())
    saved.load(view_of(other, fresh))
    assert_same(state_of(other, fresh), state_of(net, optimizer))


@pytest.mark.parametrize(
    "value",
    [
        1,
        1e-3,
        True,
        None,
        "text",
        (0.9, 0.95),
        [1, (2, None)],
        torch.tensor(1e-3),
        torch.tensor([1, 2], dtype=torch.int16),
        torch.tensor([[1.5]], dtype=torch.bfloat16),
        torch.tensor(1 + 2j),
        (torch.tensor(0.9), torch.tensor(0.95)),
        float("inf"),
        numpy.float64(0.1),
        torch.float32,
    ],
    ids=repr,
)
def test_settings_keep_their_kinds(value: Any) -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    optimizer.param_groups[0]["mine"] = value
    optimizer.param_groups[0]["initial_lr"] = 0.5
    saved = Saved(view_of(net, optimizer))
    fresh = AdamW((other := model()).parameters())
    saved.load(view_of(other, fresh))
    assert_same(fresh.param_groups[0]["mine"], value)
    assert fresh.param_groups[0]["initial_lr"] == 0.5


def test_settings_stay_where_the_configuration_wins() -> None:
    net = model()
    saved = Saved(view_of(net, AdamW(net.parameters(), lr=1.0)))
    fresh = AdamW(net.parameters(), lr=2.0)
    restore = saved.load(view_of(net, fresh), restore_settings=False)
    assert fresh.param_groups[0]["lr"] == 2.0
    assert restore.notes == []


def grouped(net: nn.Module, *names: list[str]) -> Optimizer:
    parameters = dict(net.named_parameters())
    return AdamW([{"params": [parameters[n] for n in group], "lr": 0.1 * (i + 1)} for i, group in enumerate(names)])


def test_groups_are_matched_by_name_whatever_their_order() -> None:
    net = model()
    saved = Saved(view_of(net, grouped(net, ["0.weight", "1.weight"], ["0.bias", "2.weight", "2.bias"])))
    fresh = grouped(net, ["2.bias", "0.bias", "2.weight"], ["1.weight", "0.weight"])
    assert saved.load(view_of(net, fresh)).notes == []
    assert [g["lr"] for g in fresh.param_groups] == [0.2, 0.1]


def test_a_moved_parameter_is_named() -> None:
    net = model()
    saved = Saved(view_of(net, grouped(net, ["0.weight", "1.weight"], ["0.bias", "2.weight", "2.bias"])))
    fresh = grouped(net, ["0.weight"], ["0.bias", "1.weight", "2.weight", "2.bias"])
    (note,) = saved.load(view_of(net, fresh)).notes
    assert "group 1" in note
    assert "1.weight" in note
    assert "2.weight" not in note


def test_an_added_group_is_named_by_what_moved_there() -> None:
    net = model()
    saved = Saved(view_of(net, grouped(net, ["0.weight", "1.weight"], ["0.bias", "2.weight", "2.bias"])))
    fresh = grouped(net, ["0.weight", "1.weight"], ["0.bias", "2.bias"], ["2.weight"])
    (note,) = saved.load(view_of(net, fresh)).notes
    assert "2.weight" in note
    assert fresh.param_groups[2]["lr"] == 0.2


def test_added_and_dropped_parameters_are_named() -> None:
    net = model()
    optimizer = grouped(net, ["0.weight", "1.weight"])
    train(net, optimizer)
    saved = Saved(view_of(net, optimizer))
    fresh = grouped(net, ["0.weight", "2.bias"])
    restore = saved.load(view_of(net, fresh))
    assert restore.fresh == ["2.bias"]
    notes = "\n".join(restore.notes)
    assert "adam_m.1.weight" in notes
    assert "2.bias" in notes
    assert list(state_of(net, fresh)) == ["0.weight"]


def test_another_optimizer_is_refused_and_both_are_named() -> None:
    net = model()
    saved = Saved(view_of(net, AdamW(net.parameters())))
    with pytest.raises(MismatchError, match=r"AdamW.*SGD") as caught:
        saved.prepare(view_of(net, SGD(net.parameters())))
    assert "no_load_optim" in str(caught.value)


def test_nothing_changes_before_install() -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1.0)
    train(net, optimizer)
    saved = Saved(view_of(net, optimizer))
    fresh = AdamW(net.parameters(), lr=2.0)
    saved.prepare(view_of(net, fresh))
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 2.0


def test_a_parameter_of_no_model_is_refused() -> None:
    net = model()
    optimizer = SGD([*net.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(UnsupportedStateError, match=r"\[7\]"):
        collect_optimizer(view_of(net, optimizer))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda o, p: o.state[p].update(odd=object()), r"odd\.0\.weight"),
        (lambda o, p: o.state[p].update(odd=torch.eye(2).to_sparse()), r"odd\.0\.weight"),
        (lambda o, p: o.state[p].update({3: 1}), "0.weight"),
        (lambda o, p: o.state.update(everywhere=1), "everywhere"),
        (lambda o, p: o.param_groups[0].update(odd=object()), "group 0: odd"),
        (lambda o, p: o.param_groups[0].update(odd=torch.ones(65)), "group 0: odd"),
        (lambda o, p: o.state[p].update({"a": torch.ones(1), "a.0": torch.ones(1)}), None),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(spoil: Callable[[Any, Tensor], None], what: str | None) -> None:
    net = model()
    optimizer = SGD(net.parameters())
    spoil(optimizer, net[0].weight)
    if what is None:
        collect_optimizer(view_of(net, optimizer))
        return
    with pytest.raises(UnsupportedStateError, match=what):
        collect_optimizer(view_of(net, optimizer))


class Wrapping(SGD):
    """Takes its steps through another optimizer, as sharpness-aware and look-ahead ones do."""

    def __init__(self, parameters: Any, *, shared: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = AdamW(parameters)
        if shared:
            self.state = self.base.state


def test_state_of_an_optimizer_within_is_not_lost_in_silence() -> None:
    net = model()
    parameters = list(net.parameters())
    with pytest.raises(UnsupportedStateError, match="Wrapping keeps AdamW in its 'base'"):
        collect_optimizer(view_of(net, Wrapping(parameters, shared=False)))
    collect_optimizer(view_of(net, Wrapping(parameters, shared=True)))


def test_two_states_of_one_name_are_refused() -> None:
    net = nn.Module()
    net.add_module("b", nn.Module())
    net.c = nn.Parameter(torch.ones(1))
    net.b.c = nn.Parameter(torch.ones(1))
    optimizer = SGD(net.parameters())
    optimizer.state[net.c] = {"a.b": torch.ones(1)}
    optimizer.state[net.b.c] = {"a": torch.ones(1)}
    with pytest.raises(UnsupportedStateError, match=r"a\.b\.c"):
        collect_optimizer(view_of(net, optimizer))


def mixed(net: nn.Module) -> tuple[MixedPrecisionOptimizer, OptimizerView]:
    optimizer = MixedPrecisionOptimizer([{"params": list(net.parameters())}], lambda groups: AdamW(groups, lr=1e-2))
    names = parameter_names(net)
    masters = {names[id(p)]: m for p, m in optimizer.main_params().items()}
    return optimizer, OptimizerView(optimizer, names, masters, optimizer.inner)


def test_masters_come_back_bit_for_bit_by_name() -> None:
    net = model().to(torch.bfloat16)
    net[2].float()
    net = nn.Sequential(net[0], net[1])
    optimizer, view = mixed(net)
    train(net, optimizer)
    saved = Saved(view)
    assert saved.described["type"] == "AdamW"
    assert saved.records[f"{MASTER}.0.weight"].dtype == "F32"
    assert saved.records["adam_m.0.weight"].dtype == "F32"

    other = copy.deepcopy(net)
    fresh, fresh_view = mixed(other)
    restore = saved.load(fresh_view)
    assert restore.missing_masters == []
    assert fresh.check_alignment() == []
    train(net, optimizer)
    train(other, fresh)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    for a, b in zip(view.masters.values(), fresh_view.masters.values(), strict=True):
        assert torch.equal(a, b)


def test_saving_leaves_a_mixed_precision_state_as_it_was() -> None:
    net = model().to(torch.bfloat16)
    optimizer, view = mixed(net)
    collect_optimizer(view)
    assert len(optimizer.inner.state) == 0


def test_a_master_that_is_missing_or_of_another_shape() -> None:
    net = model().to(torch.bfloat16)
    optimizer, view = mixed(net)
    train(net, optimizer)
    saved = Saved(view)
    record = saved.records.pop(f"{MASTER}.0.weight")
    _, fresh = mixed(copy.deepcopy(net))
    assert saved.prepare(fresh).missing_masters == ["0.weight"]
    saved.records[f"{MASTER}.0.weight"] = msgspec.structs.replace(record, shape=(9, 9))
    with pytest.raises(MismatchError, match=r"main_param\.0\.weight.*\[9, 9\]"):
        saved.prepare(fresh)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        (AdamW, {}, {"amsgrad": True}),
        (RMSprop, {}, {"centered": True}),
        (RMSprop, {}, {"momentum": 0.9}),
        (SGD, {}, {"momentum": 0.9}),
        (AdamW, {"amsgrad": True}, {}),
    ],
)
def test_a_setting_that_was_turned_on_has_its_state_or_is_refused(kind: Any, before: Any, after: Any) -> None:
    saved, live = model(), model(1)
    optimizer = kind(saved.parameters(), lr=0.1, **before)
    train(saved, optimizer)
    held = Saved(view_of(saved, optimizer))
    restored = kind(live.parameters(), lr=0.1, **after)
    if after and kind is not SGD:
        with pytest.raises(
            MismatchError, match=rf"optimizer: {next(iter(after))} is .* here, and the checkpoint has no"
        ):
            held.load(view_of(live, restored), restore_settings=False)
        assert not restored.state
    else:
        held.load(view_of(live, restored), restore_settings=False)
        train(live, restored)
