"""`perdure data`: what is done to training data outside of training."""

from __future__ import annotations

import click

from perdure.cli.main import LazyGroup

__all__ = ["command"]

COMMANDS = {
    "prepare": ("perdure.cli.data_prepare", "Turn text into a token file for `type: TokenFile`"),
    "audit": ("perdure.cli.data_audit", "Prove that a run consumed every sample exactly once"),
}


@click.group("data", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Prepare training data, and prove how they were used."""
