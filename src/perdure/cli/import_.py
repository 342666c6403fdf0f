"""`perdure import`: another program's checkpoint as an iteration."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click
import msgspec

from perdure.cli import render
from perdure.cli.export import RENAME_HELP, rule
from perdure.cli.paths import FilePath

__all__ = ["command"]

FORMATS = ("torch", "torch-dcp", "huggingface", "mindformers")


@click.command("import")
@click.option("--from", "kind", required=True, type=click.Choice(FORMATS), help="What SOURCE is.")
@click.argument("source", type=FilePath(path_type=Path))
@click.argument("root", type=FilePath(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Optimizer steps done; default: as SOURCE says, else 0.")
@click.option("--consumed-samples", type=click.IntRange(min=0), help="Samples used up; default: step x batch size.")
@click.option("--global-batch-size", type=click.IntRange(min=1), help="Samples per step; default: as SOURCE says.")
@click.option("--optimizer", "optimizer_type", default="AdamW", show_default=True, help="Class of the optimizer.")
@click.option("--rename", multiple=True, help=f"mindformers, huggingface: {RENAME_HELP[0].lower()}{RENAME_HELP[1:]}")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(
    kind: str,
    source: Path,
    root: Path,
    step: int | None,
    consumed_samples: int | None,
    global_batch_size: int | None,
    optimizer_type: str,
    rename: tuple[str, ...],
    as_json: bool,
) -> None:
    """Writes SOURCE as the first iteration of a new root, ROOT.

    Pickled files are read without running code that lies in them; what needs such code is refused.
    """
    from perdure.convert.memory import return_freed_memory
    from perdure.convert.state import State
    from perdure.convert.store import write_iteration

    return_freed_memory()
    if rename and kind in ("torch", "torch-dcp"):
        raise click.UsageError(f"--rename is not for `--from {kind}`")
    if kind == "torch":
        from perdure.convert.torchfile import open_torch

        opened: State = open_torch(source, optimizer_type=optimizer_type)
    elif kind == "torch-dcp":
        from perdure.convert.dcp import open_dcp

        opened = open_dcp(source, optimizer_type=optimizer_type)
    else:
        from perdure.convert.state import open_iteration

        _check_maker(source, kind)
        opened = open_iteration(source, [rule(text) for text in rename])
    with opened as state:
        common = state.common
        size = common.global_batch_size if global_batch_size is None else global_batch_size
        done = common.global_step if step is None else step
        samples = done * size if step is not None or global_batch_size is not None else common.consumed_samples
        samples = samples if consumed_samples is None else consumed_samples
        state.common = msgspec.structs.replace(
            common, global_step=done, global_batch_size=size, consumed_samples=samples
        )
        for note in state.notes:
            render.warn(note)
        total = sum(item.nbytes for item in state.items)
        with render.progress(f"import from {kind}", total) as advance:
            commit = write_iteration(state, root, advance=advance)
        counts = {part: len(state.section(part)) for part in ("model", "optimizer")}
    said = {
        "root": str(root),
        "iteration": commit.iteration,
        "consumed_samples": samples,
        "bytes": commit.size,
        **counts,
    }
    if as_json:
        render.print_json(said)
    else:
        render.say(
            f"{root}: step {commit.iteration}, sample {samples}, {counts['model']} weights, "
            f"{counts['optimizer']} tensors of the optimizer, {render.human_bytes(total)}"
        )


def _check_maker(source: Path, kind: str) -> None:
    """Refuses a directory that another program than the one named has made."""
    from perdure.catalog.foreign import WRITERS, ForeignKind, recognise
    from perdure.errors import CheckpointNotFoundError

    found = recognise(str(source))
    if found != kind:
        maker = WRITERS[cast("ForeignKind", kind)]
        hint = f"say what it is: --from {found}" if found is not None else f"name the directory that {maker} wrote"
        raise CheckpointNotFoundError(f"{source} is no checkpoint of {maker}", hint=hint)
