"""Many small runs on the ranks of one job: what `test_precision` checks. `python precision_job.py FOLDER CASE...`"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from perdure.config.schema import TrainConfig
from perdure.train.callbacks.ema import EMA

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW"},
    "AdamW-fused": {"type": "AdamW", "fused": True},
    "AdamW-foreach": {"type": "AdamW", "foreach": True},
    "Adam": {"type": "Adam"},
    "SGD": {"type": "SGD", "momentum": 0.9, "nesterov": True},
    "Muon": {"type": "Muon"},
    "Adafactor": {"type": "Adafactor"},
    "third-party": {"type": "tests.distributed.precision_job:Lion", "betas": [0.9, 0.99]},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "policy": torch.float32}


class Lion(torch.optim.Optimizer):
    """Sign of interpolated momentum (Chen et al., 2023), as someone else would write it."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(first * momentum + (1 - first) * p.grad), alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


class Blocks(nn.Module):
    """The tiny network, its layers in a list as FSDP2 cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.Linear(7, 7)])
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.last.weight.dtype)
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        out: Tensor = self.last(x)
        return out


class Known(Blocks):
    """The same parameters, each element of which has the gradient one half whatever the samples."""

    def forward(self, x: Tensor) -> Tensor:
        layers = [*self.layers, self.last]
        ones = [torch.ones(layer.in_features, dtype=layer.weight.dtype) for layer in layers]
        return torch.stack([layer(one).float().sum() for layer, one in zip(layers, ones, strict=True)]).sum() * 0.5


class Aligned(tiny.Callback):
    """After every load and every step each parameter is the rounding of its master."""

    def check(self, trainer: Any) -> None:
        optimizer = trainer.optimizer
        for parameter, master in getattr(optimizer, "main_params", dict)().items():
            here, held = (t.to_local() if hasattr(t, "to_local") else t for t in (parameter.detach(), master))
            assert torch.equal(held.to(here.dtype), here)

    def on_train_begin(self, trainer: Any, state: Any) -> None:
        self.check(trainer)

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.check(trainer)


def run(output: Path, steps: int, optimizer: str, precision: str, **keys: Any) -> Any:
    """One start of a run; float16 begins with a loss scale that is too large."""
    given = {
        "model": lambda: Blocks().to(DTYPES[precision]),
        "loss": lambda m, b: tiny.loss_of(m, b) * (50 if precision == "float16" else 1),
        "optimizer": OPTIMIZERS[optimizer],
        **keys,
        "callbacks": (Aligned(), *keys.get("callbacks", ())),
    }
    made = tiny.trainer(output, steps, **given)
    if precision == "policy":
        made.config = TrainConfig(
            **tiny.config(output, steps, optimizer=OPTIMIZERS[optimizer], model={"compute_dtype": "bfloat16"})
        )
    made.train()
    return made


def same(a: Path, b: Path) -> None:
    """Both runs did the same and ended in the same state, in every bit."""
    dist.barrier()
    assert tiny.trace(a) == tiny.trace(b)
    one, other = (tiny.newest(each / "checkpoint") for each in (a, b))
    assert whole_state(one) == whole_state(other)
    assert tiny.common(one) == tiny.common(other)
    dist.barrier()


def whole_state(iteration: Any) -> dict[str, list[Any]]:
    """The digests of all shards of all tensors."""
    import json

    metadata = json.loads((Path(iteration.path) / "metadata.json").read_text())
    return {
        f"{section}:{name}": sorted((shard[1], shard[3]) for shard in record["shards"])
        for section in ("model", "optimizer", "extra")
        for name, record in metadata[section].items()
    }


def optimizer_case(folder: Path, optimizer: str, precision: str) -> None:
    layout = {"parallelism": {"data_parallel_replicate": 2}} if optimizer == "Adafactor" else {}
    straight = run(folder / "a", 8, optimizer, precision, **layout)
    for stop in (3, 8):
        parts = run(folder / "b", stop, optimizer, precision, **layout)
    same(folder / "a", folder / "b")
    if precision == "float16":
        assert straight.scaler.scale == parts.scaler.scale < 65536.0
    if precision in ("bfloat16", "float16"):
        assert len(parts.optimizer.main_params()) == 6
    if not layout:
        assert all(hasattr(p, "placements") for p in parts.model.parameters())
    if precision == "policy":
        (dtype,) = {p.dtype for p in parts.model.parameters()}
        assert dtype == torch.float32
        dist.barrier()
        other = run(folder / "c", 8, optimizer, "float32", **layout)
        assert tiny.trace(folder / "c") != tiny.trace(folder / "a")
        assert other.state.loss == pytest.approx(parts.state.loss, rel=0.1)


def weights_only(folder: Path) -> None:
    """The reference's 1.5, sharded: after lr 0 the weights are the loaded ones; the twin moves from them."""
    run(folder / "given", 5, "SGD", "bfloat16")
    given = tiny.state(tiny.newest(folder / "given" / "checkpoint"), "model")
    load = {"load_path": str(folder / "given" / "checkpoint"), "no_load_optim": True}
    for rate in (0.0, 0.25):
        schedule = {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": rate}

        class Look(tiny.Callback):
            def on_train_begin(self, trainer: Any, state: Any) -> None:
                self.masters = [master.full_tensor().clone() for master in trainer.optimizer.main_params().values()]

        look = Look()
        made = run(
            folder / f"lr{rate}", 1, "SGD", "bfloat16", checkpoint=load, lr_scheduler=schedule, callbacks=(look,),
            training={"max_norm": float("inf")},
            model=lambda: Known().bfloat16(), loss=lambda net, batch: net(batch[1]),
        )  # fmt: skip
        dist.barrier()
        got = tiny.state(tiny.newest(folder / f"lr{rate}" / "checkpoint"), "model")
        assert (got == given) == (rate == 0.0)
        for before, master in zip(look.masters, made.optimizer.main_params().values(), strict=True):
            # Every gradient is one half over the four samples of the step; decay and momentum have had no say yet.
            moved = master.full_tensor().double()
            decayed = before.double()
            expected = decayed - rate * (0.5 + (0.01 * decayed if before.dim() > 1 else 0.0)) * 1.9
            torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)


def stateless(folder: Path) -> None:
    """An optimizer that keeps nothing, saved before its first step and after."""
    from perdure import CheckpointConfig, Checkpointer, Progress
    from perdure.optim.build import build_optimizer

    for steps in (0, 2):
        found = []
        for load in (False, True):
            torch.manual_seed(3)
            model = Blocks()
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            optimizer = build_optimizer({"type": "SGD"}, model, lr=0.1)
            config = CheckpointConfig(save_path=str(folder / str(steps)), auto_resume=True)
            with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as checkpointer:
                progress = checkpointer.load()
                assert progress.global_step == (steps if load else 0)
                for _ in range(0 if load else steps):
                    model(torch.ones(2, 4)).sum().backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                if not load:
                    checkpointer.save(Progress(steps, steps * 4, 4), wait=True)
            found.append((optimizer.state_dict(), [p.full_tensor() for p in model.parameters()]))  # type: ignore[attr-defined]
        (before, held), (after, loaded) = found
        assert before == after
        assert all(torch.equal(a, b) for a, b in zip(held, loaded, strict=True))


DECODER = {
    "type": "decoder", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "params_dtype": "bfloat16", "dropout": 0.1,
}  # fmt: skip
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2},
}


def cut(folder: Path, kind: str) -> None:
    """Masters of a model that is cut by tensors or into stages."""
    from perdure import Trainer

    def start(output: Path, steps: int, **sections: Any) -> Any:
        config = {
            **tiny.config(output, steps, parallelism=CUTS[kind], **sections),
            "model": DECODER,
            "train_dataset": {
                "num_parallel_workers": 0,
                "dataloader": {"type": "Text", "path": "python-docs", "seq_length": 16, "shuffle": True},
            },
        }
        made = Trainer(config, callbacks=(Aligned(),))
        made.train()
        return made

    start(folder / "a", 7)
    for stop in (3, 7):
        made = start(folder / "b", stop)
    same(folder / "a", folder / "b")
    assert made.optimizer.main_params()
    if kind == "pipeline":
        over = {"base_load_path": str(folder / "a" / "checkpoint"), "save_trainable_only": True}
        keys = {"checkpoint": over, "lora_config": {"target_modules": ["q_proj", "up_proj"], "lora_b_std": 0.1}}
        start(folder / "c", 5, **keys)
        for stop in (2, 5):
            start(folder / "d", stop, **keys)
        same(folder / "c", folder / "d")
        saved = tiny.state(tiny.newest(folder / "d" / "checkpoint"), "model")
        assert len(saved) == 8
        assert all("lora_" in name for name in saved)


def going_back(folder: Path, layout: dict[str, Any]) -> None:
    """All ranks return together, and the run is the one that leaves the samples out."""
    from perdure.data.order import EpochOrder

    bad = EpochOrder(400, 3, shuffle=True).slice(0, 400)[4 * 23 + 2]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return tiny.loss_of(model, batch) * (math.nan if bad in batch[0].tolist() else 1.0)

    keys = {"monitor": {"health_checkpoint": {"on_spike": "rollback"}}, "parallelism": layout}
    for name, training in (("told", {"skip_ranges": [[92, 96]]}), ("found", {})):
        run(folder / name, 30, "AdamW", "float32", loss=loss, data=tiny.Noisy(400), training=training, **keys)
    same(folder / "told", folder / "found")


def frozen() -> nn.Module:
    net = Blocks().bfloat16()
    net.layers[0].requires_grad_(False)
    return net


def freezing(folder: Path) -> None:
    """State of a sharded parameter outlasts its being frozen."""
    run(folder / "a", 3, "AdamW", "bfloat16")
    dist.barrier()
    before = whole_state(tiny.newest(folder / "a" / "checkpoint"))
    for stop in (4, 5):
        run(folder / "a", stop, "AdamW", "bfloat16", model=frozen)
    dist.barrier()
    after = whole_state(tiny.newest(folder / "a" / "checkpoint"))
    kept = [name for name in before if "layers.0." in name]
    assert len(kept) == 8
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    run(folder / "a", 6, "AdamW", "bfloat16")


def changes(folder: Path) -> None:
    """Sharded masters take exact float32 weights, and float32 weights exact masters; nothing moves at rate 0."""
    still = {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": 0.0}
    run(folder / "a", 3, "AdamW", "float32")
    exact: dict[str, Any] = {}
    for stop, precision in ((3, "float32"), (4, "bfloat16"), (5, "float16"), (6, "float32")):
        run(folder / "a", stop, "AdamW", precision, lr_scheduler=still, loss=tiny.loss_of)
        dist.barrier()
        state = whole_state(tiny.newest(folder / "a" / "checkpoint"))
        wanted = "model:" if precision == "float32" else "optimizer:main_param."
        held = {name.removeprefix(wanted): each for name, each in state.items() if name.startswith(wanted)}
        exact = exact or held
        assert held == exact, precision
        dist.barrier()


def average(folder: Path) -> None:
    """An average that is sharded as the model is."""
    for output, stops in ((folder / "a", (7,)), (folder / "b", (3, 7))):
        for stop in stops:
            ema = EMA(0.75, export=str(folder / "exported"))
            run(output, stop, "AdamW", "bfloat16", callbacks=(ema,))
    same(folder / "a", folder / "b")
    assert all(hasattr(each, "placements") for each in ema.weights.values())


def adapters(folder: Path) -> None:
    """A sharded adapter over a sharded base, which is known by its contents however it is cut."""
    run(folder / "base", 3, "AdamW", "float32")
    keys = {
        "checkpoint": {"base_load_path": str(folder / "base" / "checkpoint"), "save_trainable_only": True},
        "lora_config": {"target_modules": ["layers.*"], "lora_rank": 2, "lora_b_std": 0.1},
    }
    run(folder / "a", 7, "AdamW", "float32", **keys)
    for stop in (3, 7):
        run(folder / "b", stop, "AdamW", "float32", **keys)
    same(folder / "a", folder / "b")
    assert all("lora_" in name for name in tiny.state(tiny.newest(folder / "b" / "checkpoint"), "model"))


CASES: dict[str, Callable[[Path], None]] = {
    **{
        f"{name} {precision}": lambda folder, n=name, p=precision: optimizer_case(folder, n, p)  # type: ignore[misc]
        for name in OPTIMIZERS
        for precision in DTYPES
        if not (name == "Adafactor" and precision == "policy")
    },
    "weights only": weights_only,
    "stateless": stateless,
    "tensor": lambda folder: cut(folder, "tensor"),
    "pipeline": lambda folder: cut(folder, "pipeline"),
    "going back, sharded": lambda folder: going_back(folder, {}),
    "going back, replicated": lambda folder: going_back(folder, {"data_parallel_replicate": 2}),
    "freezing": freezing,
    "changes": changes,
    "average": average,
    "adapters": adapters,
}


def main(folder: Path, names: list[str]) -> int:
    """Runs the cases; each that fails is told, on every rank, with what was raised."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    failed = 0
    for name in names:
        try:
            CASES[name](folder / name.replace(" ", "-"))
        except BaseException:
            failed += 1
            sys.stderr.write(f"FAILED {name} on rank {dist.get_rank()}\n{traceback.format_exc()}\n")
            sys.stderr.flush()
            break
        if dist.get_rank() == 0:
            sys.stderr.write(f"PASSED {name}\n")
    if not failed:
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    os.environ.setdefault("PERDURE_NO_PROGRESS", "1")
    code = main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
    sys.stdout.flush()
    os._exit(code)
