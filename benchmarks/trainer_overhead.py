"""What the Trainer adds to a step, over a bare loop with the same model, data and clipping; medians of pairs.

    python benchmarks/trainer_overhead.py [--steps 60] [--rounds 5]

One thread, and processor time instead of the clock's, so that what else runs on the machine does not count.
A second pair with a model of no size shows the Trainer's own code alone.
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
from perdure.data.sources.registry import build_source
from perdure.models.decoder import Decoder

USUAL = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
WARM = 10
"""Steps that are not counted."""


def bare(steps: int, sizes: dict[str, int]) -> float:
    torch.manual_seed(0)
    source = build_source("Text", {"path": "python-docs", "seq_length": 128})
    model = Decoder(vocab_size=257, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    began = 0.0
    for step in range(steps):
        if step == WARM:
            began = time.process_time()
        rows = [source[index] for index in range(step * 4, step * 4 + 4)]
        batch = {k: torch.stack([r[k] for r in rows]) for k in ("input_ids", "labels")}
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (time.process_time() - began) / (steps - WARM)


def with_trainer(steps: int, sizes: dict[str, int], folder: str) -> float:
    config = {
        "training": {"steps": steps, "local_batch_size": 4, "global_batch_size": 4, "seed": 0},
        "model": {"type": "decoder", **sizes},
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
            marks.append(time.process_time())

        def on_train_end(self, trainer: object, state: object) -> None:
            marks.append(time.process_time())

    Trainer(config, callbacks=[Clock()]).train()
    return (marks[-1] - marks[WARM]) / (steps - WARM)


def pairs(rounds: int, steps: int, sizes: dict[str, int]) -> list[tuple[float, float]]:
    """Seconds of a step, bare and in the Trainer, in turn."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append((bare(steps, sizes), with_trainer(steps, sizes, folder)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["PERDURE_NO_PROGRESS"] = "1"
    torch.set_num_threads(1)
    usual = pairs(options.rounds, options.steps, USUAL)
    tiny = pairs(options.rounds, 5 * options.steps, TINY)
    plain, full = (statistics.median(pair[i] for pair in usual) for i in (0, 1))
    ratio = statistics.median(b / a for a, b in usual)
    own = statistics.median(b - a for a, b in tiny)
    print(f"processor time of a step: bare loop {plain * 1e3:.2f} ms, Trainer {full * 1e3:.2f} ms")
    print(f"ratio (median of pairs) {ratio:.4f}")
    print(f"with a model of no size: {own * 1e3:.3f} ms more, {own / 0.05:.2%} of a step of 50 ms")
    target = Path(__file__).parent / "results" / "trainer_overhead.json"
    target.parent.mkdir(exist_ok=True)
    figures = {"bare_s": plain, "trainer_s": full, "ratio": ratio, "own_s": own, "pairs": usual, "tiny": tiny}
    target.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
