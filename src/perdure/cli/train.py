"""`perdure train CONFIG [section.key=value ...]`: one rank of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import click

__all__ = ["command"]


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path())
@click.argument("overrides", nargs=-1)
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Train from CONFIG, a YAML file. The same command, started again, resumes.

    Values of the file are overridden by section.key=value words. On several ranks:
    torchrun --nproc-per-node 8 -m perdure train CONFIG
    """
    from perdure.config.load import load_config

    loaded = load_config(config, overrides)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        _join(float(os.environ.get("PERDURE_RANK_DEADLINE", "300")))
    from perdure.train.trainer import Trainer

    state = Trainer(loaded).train()
    if distributed:
        import torch.distributed as dist

        # All ranks leave together: one that goes early tears connections that another still closes.
        dist.barrier()
        dist.destroy_process_group()
    return 128 + state.stop_signal if state.stop_signal else 0


def _join(deadline_s: float) -> None:
    import torch
    import torch.distributed as dist

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=deadline_s))
