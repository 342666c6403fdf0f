"""What FP32 masters are for: validation loss of float32, of bfloat16 with masters, and of bfloat16 without.

The same small decoder on the language reference that ships inside Python, from the same draws over the same samples;
a sixteenth of the windows is held out. "With masters" must end within MARGIN of float32, "without" must not.

python benchmarks/precision.py [--steps 400] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from perdure import Trainer
from perdure.config.schema import TrainConfig
from perdure.data.sources import build_source
from perdure.models.build import build_model
from perdure.optim.build import build_optimizer
from perdure.train.history import read_lines

MARGIN = 0.01
"""Nats per byte that rounding of weights may cost."""
EVERY = 50
RESULTS = Path(__file__).parent / "results"
KINDS = {"float32": "float32", "bfloat16, FP32 masters": "bfloat16", "bfloat16, no masters": "bfloat16"}


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Every window of the text whose number leaves one of some rests modulo 16."""

    draws_random = False
    vocab_size = 257

    def __init__(self, rests: range) -> None:
        self.text = build_source("Text", {"path": "python-docs", "seq_length": 128})
        self.rests = rests

    def __len__(self) -> int:
        return len(self.text) // 16 * len(self.rests)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block, rest = divmod(index, len(self.rests))
        return self.text[16 * block + self.rests[rest]]  # type: ignore[no-any-return]


class Few(Windows):
    """The first of them: enough to compare by."""

    def __len__(self) -> int:
        return 128


def settings(dtype: str, steps: int, seed: int, folder: str) -> dict[str, Any]:
    return {
        "training": {
            "steps": steps,
            "local_batch_size": 8,
            "global_batch_size": 8,
            "seed": seed,
            "eval_interleaved_steps": EVERY,
        },
        "model": {
            "type": "decoder",
            "vocab_size": 257,
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "params_dtype": dtype,
        },
        "optimizer": {"type": "AdamW", "weight_decay": 0.1},
        "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 2e-4, "warmup_ratio": 0.1, "lr_end": 0.0},
        "train_dataset": {"num_parallel_workers": 0, "dataloader": {"shuffle": True}},
        "eval_dataset": {"num_parallel_workers": 0, "dataloader": {"type": "Text"}},
        "checkpoint": {"enable_save": False},
        "output_dir": folder,
    }


def run(kind: str, steps: int, seed: int) -> list[tuple[int, float]]:
    """(step, validation loss) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(**settings(KINDS[kind], steps, seed, folder))
        torch.manual_seed(seed)
        model = build_model(config.model)
        optimizer = build_optimizer(
            config.optimizer, model, lr=config.lr_scheduler.learning_rate, master_weights="no masters" not in kind
        )
        Trainer(
            config,
            model=model,
            optimizer=optimizer,
            train_dataset=Windows(range(1, 16)),
            eval_dataset=Few(range(1)),
        ).train()
        rows = read_lines(f"{folder}/metrics.jsonl")
    return [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]


def plot(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Mean curves of the three kinds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "perdure"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for (kind, points), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        axes.plot(*zip(*points, strict=True), style, label=kind)
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    runs = {kind: [run(kind, args.steps, seed) for seed in range(args.seeds)] for kind in KINDS}
    curves = {
        kind: [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*seeds, strict=True)]
        for kind, seeds in runs.items()
    }
    last = {kind: [seed[-1][1] for seed in seeds] for kind, seeds in runs.items()}
    apart = {
        kind: [loss - reference for loss, reference in zip(losses, last["float32"], strict=True)]
        for kind, losses in last.items()
    }
    for kind, losses in last.items():
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"{kind:<24} {shown}   above float32: {', '.join(f'{d:+.4f}' for d in apart[kind])}")
    result = {
        "steps": args.steps,
        "margin": MARGIN,
        "validation_loss": last,
        "above_float32": apart,
        "with_masters_within_margin": all(abs(d) <= MARGIN for d in apart["bfloat16, FP32 masters"]),
        "without_masters_outside": all(d > MARGIN for d in apart["bfloat16, no masters"]),
        "curves": curves,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "precision.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(curves, RESULTS / "precision.svg")
    if not (result["with_masters_within_margin"] and result["without_masters_outside"]):
        raise SystemExit("the margin does not hold")


if __name__ == "__main__":
    main()
