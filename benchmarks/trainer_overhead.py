"""What the Trainer adds to a step, over a bare loop with the same model, data and clipping; interleaved medians.

python benchmarks/trainer_overhead.py [--steps 60] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from perdure import Callback, Trainer
from perdure.data.sources import build_source
from perdure.models.decoder import Decoder

SIZES = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}


def bare(steps: int) -> float:
    torch.manual_seed(0)
    source = build_source("Text", {"path": "python-docs", "seq_length": 128})
    model = Decoder(vocab_size=257, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = [source[i] for i in range(steps * 4)]
    began = 0.0
    for step in range(steps):
        if step == 5:
            began = time.perf_counter()
        batch = {k: torch.stack([r[k] for r in rows[step * 4 : step * 4 + 4]]) for k in ("input_ids", "labels")}
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (time.perf_counter() - began) / (steps - 5)


def with_trainer(steps: int, folder: str) -> float:
    config = {
        "training": {"steps": steps, "local_batch_size": 4, "global_batch_size": 4, "seed": 0},
        "model": {"type": "decoder", **SIZES},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-4},
        "train_dataset": {
            "num_parallel_workers": 0,
            "dataloader": {"type": "Text", "path": "python-docs", "seq_length": 128, "shuffle": True},
        },
        "checkpoint": {"save_interleaved_steps": 10**9, "enable_save": False},
        "output_dir": folder,
    }
    marks: list[float] = []

    class Clock(Callback):
        def on_step_begin(self, trainer: object, state: object) -> None:
            marks.append(time.perf_counter())

    Trainer(config, callbacks=[Clock()]).train()
    return (time.perf_counter() - marks[5]) / (steps - 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["PERDURE_NO_PROGRESS"] = "1"
    ratios, figures = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain, full = bare(options.steps), with_trainer(options.steps, folder)
        ratios.append(full / plain)
        figures.append((plain, full))
    plain, full = (statistics.median(f[i] for f in figures) for i in (0, 1))
    print(f"bare loop {plain * 1e3:.2f} ms, Trainer {full * 1e3:.2f} ms")
    print(f"ratio (median of pairs) {statistics.median(ratios):.4f}")
    target = Path(__file__).parent / "results" / "trainer_overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"bare_s": plain, "trainer_s": full, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
