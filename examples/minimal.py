"""Your own loop, made resumable. Kill it anywhere and run it again: python examples/minimal.py"""

import sys

import torch
from torch import nn

from perdure import CheckpointConfig, Checkpointer, ResumableLoader
from perdure.state.random import seed_streams

STEPS, SEED = 200, 0


def train(output: str = "./output/minimal") -> float:
    torch.manual_seed(SEED)
    inputs = torch.randn(1000, 8)
    dataset = list(zip(inputs, inputs.sum(1, keepdim=True), strict=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ResumableLoader(dataset, global_batch_size=32, seed=SEED)
    config = CheckpointConfig(save_path=output, save_interleaved_steps=20, auto_resume=True)
    with Checkpointer(config, model=model, optimizer=optimizer) as checkpointer:
        progress = checkpointer.load()  # zero progress on a first start
        loader.resume(progress)
        for batch in loader.take(STEPS - progress.global_step):
            seed_streams(SEED, batch.first)  # dropout draws the same, restarted or not
            for x, y in batch:  # this rank's micro-batches
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            progress.advance(global_batch_size=32)
            checkpointer.step(progress)  # saves when due
        checkpointer.save(progress, wait=True)
    loader.close()
    model.eval()
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)))


if __name__ == "__main__":
    print(f"loss {train(*sys.argv[1:2]):.6f}")
