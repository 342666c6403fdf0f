"""`perdure reshard`: an iteration written anew for another number of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import click

from perdure.cli import render
from perdure.cli.paths import FilePath

__all__ = ["command"]


@click.command("reshard")
@click.argument("path", type=FilePath(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="How many ranks to cut for; 1 merges.")
@click.option("--to", "target", type=FilePath(path_type=Path), help="New root; default: `ROOT-N-ranks` beside it.")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(path: Path, ranks: int, target: Path | None, as_json: bool) -> None:
    """Writes PATH, an iteration directory or a root (what a resume would take), for N ranks below a new root.

    A run on any number of ranks reads any iteration, so this is needed for nothing but speed: a rank then reads whole
    files of its own. It stays the same save of the same run, bit for bit; a resume from it goes on with that run.
    """
    from perdure.convert.memory import return_freed_memory
    from perdure.convert.state import open_iteration
    from perdure.convert.store import write_iteration
    from perdure.errors import UsageError
    from perdure.format.names import parse_shard_filename

    return_freed_memory()
    with open_iteration(path) as state:
        if state.commit is None:
            raise UsageError(
                f"{path} was made by another program", hint=f"import it first: perdure import --from FORMAT {path} ROOT"
            )
        root = target or Path(f"{state.root}-{ranks}-rank{'s' if ranks != 1 else ''}")
        names = [parse_shard_filename(name) for name in os.listdir(state.where)]
        prefix = next((name.prefix for name in names if name is not None), "checkpoint")
        modes = {name: each.get("mode") for name, each in state.training.get("extra", {}).items()}
        per_rank = sorted(name for name, mode in modes.items() if mode == "per_rank")
        if per_rank and ranks != state.commit.ranks:
            render.warn(
                f"{', '.join(per_rank)} was saved once per rank by {state.commit.ranks} ranks and stays so: only a run "
                "on as many can restore it, unless the object says how to merge"
            )
        total = sum(item.nbytes for item in state.items)
        with render.progress(f"reshard for {ranks}", total) as advance:
            commit = write_iteration(state, root, ranks=ranks, origin=state.commit, prefix=prefix, advance=advance)
        source, before = state.where, state.commit.ranks
    if as_json:
        said = {"from": source, "root": str(root), "iteration": commit.iteration, "ranks": ranks, "bytes": commit.size}
        render.print_json({**said, "ranks_before": before})
    else:
        render.say(
            f"{root}: step {commit.iteration}, {render.human_bytes(total)}, cut for {ranks} rank"
            f"{'s' if ranks != 1 else ''} (before: {before})"
        )
