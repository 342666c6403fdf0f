"""Every optimizer in every precision resumes in every bit, and masters follow independent float64 arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from tests.distributed.precision_job import DTYPES, OPTIMIZERS, Aligned, Blocks
from torch import Tensor, nn

PRECISIONS = ("float32", "bfloat16", "float16")
CHEAP = ("AdamW", "Muon", "third-party")


def combinations() -> list[Any]:
    """All of them; the rest beside one precision each are left to the slow run."""
    found = []
    for number, name in enumerate(OPTIMIZERS):
        for place, precision in enumerate(PRECISIONS):
            slow = name not in CHEAP and place != number % 3
            found.append(pytest.param(name, precision, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.mark.parametrize(("optimizer", "precision"), combinations())
def test_it_resumes_in_every_bit(tmp_path: Path, optimizer: str, precision: str) -> None:
    def start(name: str, steps: int) -> Any:
        made = tiny.trainer(
            tmp_path / name,
            steps,
            model=lambda: Blocks().to(DTYPES[precision]),
            loss=lambda m, b: tiny.loss_of(m, b) * (50 if precision == "float16" else 1),
            optimizer=OPTIMIZERS[optimizer],
            callbacks=(Aligned(),),
        )
        made.train()
        return made

    straight = start("a", 11)
    for stop in (2, 7, 11):
        parts = start("b", stop)
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    a, b = (tiny.newest(tmp_path / name / "checkpoint") for name in "ab")
    assert tiny.state(a) == tiny.state(b)
    assert tiny.common(a) == tiny.common(b)
    assert straight.scaler.state_dict() == parts.scaler.state_dict()
    held = {name.removeprefix("optimizer:main_param.") for name in tiny.state(b) if "main_param" in name}
    assert held == (set() if precision == "float32" else set(tiny.weights(parts.model)))


# ---- against arithmetic of our own

RATE, DECAY, EPS, BETAS, MOMENTUM = 0.02, 0.1, 1e-8, (0.9, 0.95), 0.9


def known_loss(model: nn.Module, batch: Any) -> Tensor:
    """Gradients that depend on the step's samples alone, each exact in bfloat16."""
    scale = float(batch[0].float().mean() // 4 + 1) / 16
    return torch.stack([p.float().sum() for p in model.parameters()]).sum() * scale


def gradients(steps: int) -> list[float]:
    """The gradient of every element at every step: the mean over the step's two micro-batches."""
    from perdure.data.order import EpochOrder

    ids = EpochOrder(tiny.LENGTH, 3, shuffle=True).slice(0, 4 * steps)
    halves = [(ids[2 * i] + ids[2 * i + 1]) / 2 // 4 + 1 for i in range(2 * steps)]
    return [(halves[2 * i] + halves[2 * i + 1]) / 2 / 16 for i in range(steps)]


def adamw(p: Tensor, g: list[float]) -> Tensor:
    m = v = 0.0
    decay = DECAY if p.dim() > 1 else 0.0
    for t, gradient in enumerate(g, start=1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * gradient, BETAS[1] * v + (1 - BETAS[1]) * gradient**2
        p = p * (1 - RATE * decay)
        p = p - RATE * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)) ** 0.5 + EPS)
    return p


def adam(p: Tensor, g: list[float]) -> Tensor:
    m = v = torch.zeros_like(p)
    decay = DECAY if p.dim() > 1 else 0.0
    for t, gradient in enumerate(g, start=1):
        full = gradient + decay * p
        m, v = BETAS[0] * m + (1 - BETAS[0]) * full, BETAS[1] * v + (1 - BETAS[1]) * full**2
        p = p - RATE * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)) ** 0.5 + EPS)
    return p


def sgd(p: Tensor, g: list[float]) -> Tensor:
    buffer: Tensor | None = None
    decay = DECAY if p.dim() > 1 else 0.0
    for gradient in g:
        full = gradient + decay * p
        buffer = full if buffer is None else MOMENTUM * buffer + full
        p = p - RATE * buffer
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("keys", "reference"), [({"type": "AdamW"}, adamw), ({"type": "Adam"}, adam),
                                                 ({"type": "SGD", "momentum": MOMENTUM}, sgd)])  # fmt: skip
def test_a_resumed_run_follows_float64(
    tmp_path: Path, dtype: torch.dtype, keys: dict[str, Any], reference: Any
) -> None:
    steps = 9
    own = {**keys, "weight_decay": DECAY} | ({"betas": list(BETAS), "eps": EPS} if keys["type"] != "SGD" else {})
    sections: dict[str, Any] = {
        "training": {"max_norm": float("inf")},
        "optimizer": own,
        "lr_scheduler": {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": RATE},
    }
    torch.manual_seed(7)
    first = {name: value.double() for name, value in tiny.weights(tiny.Net().to(dtype)).items()}
    for stop in (4, steps):
        made = tiny.trainer(tmp_path, stop, model=lambda: tiny.Net().to(dtype), loss=known_loss, **sections)
        made.train()
    assert made.model is not None
    masters = made.optimizer.main_params() if dtype == torch.bfloat16 else {}
    for name, parameter in made.model.named_parameters():
        expected = reference(first[name], gradients(steps))
        held = masters.get(parameter, parameter).detach()
        torch.testing.assert_close(held.double(), expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(parameter.detach(), held.to(dtype))
