"""Recomputation saves memory and changes nothing else: losses, gradients and draws are equal in every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.config.schema import RecomputeConfig
from perdure.errors import UsageError
from perdure.models.decoder import Decoder
from perdure.parallel.recompute import apply_recompute
from perdure.state.model import model_tensors

IDS = torch.arange(24).reshape(2, 12) * 5 % 61


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **kwargs or {})


def decoder() -> Decoder:
    torch.manual_seed(1)
    return Decoder(
        vocab_size=61, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, dropout=0.3
    )


def run(**recompute: Any) -> tuple[Tensor, dict[str, Tensor], list[str], int]:
    """Loss, gradients, names, and how many matrix products it took."""
    model = decoder()
    apply_recompute(list(model.layers.values()), RecomputeConfig(**recompute))
    torch.manual_seed(2)
    with Counting() as counted:
        loss = model(IDS).float().square().mean()
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, [t.name for t in model_tensors(model)], counted.count


@pytest.mark.parametrize(
    ("recompute", "products"),
    [
        ({"mode": "full", "full_recompute_layer": ["0-2"]}, 7 * 3),
        ({"mode": "full", "full_recompute_layer": ["0", "2"]}, 7 * 2),
        ({"mode": "select", "select_module": {"mlp": ["0-2"]}}, 3 * 3),
        ({"mode": "select", "select_module": {r"self_attn\.._proj": ["1"], "mlp": ["1-2"]}}, 3 * 2 + 4),
        ({"mode": "select", "select_module": {"mlp": ["0-2"], r"mlp\.up_proj": ["0-2"]}}, 3 * 3),
        ({"mode": "full", "full_recompute_layer": ["0-2"], "exclude_op": {"mm": ["0-1"]}}, 7),
    ],
)
def test_all_bits_are_those_of_a_run_without(recompute: dict[str, Any], products: int) -> None:
    loss, gradients, names, count = run(mode="None")
    again, found, same_names, more = run(**recompute)
    assert torch.equal(again, loss)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradients[name]) for name in gradients)
    assert same_names == names
    # torch stops a second forward when it has all that the backward pass needs.
    assert products - 6 <= more - count <= products
    assert more > count


def test_nothing_is_computed_twice_without_gradients() -> None:
    model = decoder().eval()
    with torch.no_grad(), Counting() as plain:
        expected = model(IDS)
    apply_recompute(list(model.layers.values()), RecomputeConfig(mode="full", full_recompute_layer=["0-2"]))
    with torch.no_grad(), Counting() as counted:
        assert torch.equal(model(IDS), expected)
    assert counted.count == plain.count


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        (
            {"mode": "full", "full_recompute_layer": ["0-3"]},
            "full_recompute_layer: expected layers from 0 to 2, found 3",
        ),
        ({"mode": "select", "select_module": {"mpl": ["0"]}}, "no module of the layers matches 'mpl'; a layer has"),
        (
            {"mode": "select", "select_module": {"mlp": ["7"]}},
            "select_module.mlp: expected layers from 0 to 2, found 7",
        ),
        (
            {"mode": "full", "full_recompute_layer": ["0"], "exclude_op": {"matmull": ["0"]}},
            "torch has no operator 'matmull'",
        ),
    ],
)
def test_what_is_not_there_is_refused_in_words(recompute: dict[str, Any], words: str) -> None:
    layers: list[nn.Module] = list(decoder().layers.values())
    with pytest.raises(UsageError, match=words):
        apply_recompute(layers, RecomputeConfig(**recompute))
