"""`perdure train CONFIG [section.key=value ...]`: one rank of a run."""

from __future__ import annotations

import os

import click

from perdure.cli.paths import FilePath
from perdure.train.stop import Stopped, StopRequest, listen

__all__ = ["command"]


@click.command("train", context_settings={"ignore_unknown_options": True})
@click.argument("config", type=FilePath())
@click.argument("overrides", nargs=-1)
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Train from CONFIG, a YAML file. The same command, started again, resumes.

    Values of the file are overridden by section.key=value words. On several ranks:
    torchrun --nproc-per-node 8 -m perdure train CONFIG
    """
    try:
        with listen(importing=True) as stop:
            number = _train(config, overrides, stop)
    except Stopped as stopped:
        number = stopped.signal
    return 128 + number if number else 0


def _train(config: str, overrides: tuple[str, ...], stop: StopRequest) -> int:
    """The signal that ended the run, or 0."""
    from perdure.config.load import load_config
    from perdure.engine.launcher import launched_ranks

    loaded = load_config(config, overrides)
    distributed = launched_ranks() > 1
    # A broken connection is told once, in our words, and not by each of torch's threads with a stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch, from here on: seconds, in which a signal is listened for already.
    from perdure.engine.join import join, leave_together
    from perdure.train.trainer import Trainer

    stop.imported()
    if distributed:
        join()
    stopped = Trainer(loaded).train().stop_signal
    if distributed:
        leave_together()
    return stopped
