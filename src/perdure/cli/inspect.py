"""`perdure inspect`: what one iteration holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from perdure.catalog.checkpoint import Checkpoint
from perdure.cli import render
from perdure.cli.paths import FilePath
from perdure.format.metadata import SECTIONS, Section, TensorRecord

__all__ = ["command"]

_SHOWN = 20


@click.command("inspect")
@click.argument("path", type=FilePath(path_type=Path))
@click.option("--all", "everything", is_flag=True, help=f"Every tensor, not the first {_SHOWN} of each section.")
@click.option("--section", type=click.Choice(SECTIONS), help="The tensors of one section only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with every tensor.")
def command(path: Path, everything: bool, section: Section | None, as_json: bool) -> None:
    """Shows progress, writer and tensors of PATH: an iteration directory, or a root (what a resume would take).

    Checkpoints of MindSpore Transformers and Hugging Face directories are shown too.
    """
    checkpoint = Checkpoint(path)
    for warning in checkpoint.warnings:
        render.warn(warning)
    sections: list[Section] = list(SECTIONS) if section is None else [section]
    if as_json:
        render.print_json(_document(checkpoint, sections))
        return
    _show_head(checkpoint)
    for part in sections:
        _show_section(checkpoint, part, everything)


def _document(checkpoint: Checkpoint, sections: list[Section]) -> dict[str, Any]:
    metadata = checkpoint.metadata
    return {
        "path": checkpoint.path,
        "kind": checkpoint.kind,
        "writer": checkpoint.writer,
        "iteration": checkpoint.iteration,
        "ranks": checkpoint.ranks,
        "bytes": checkpoint.size,
        "commit": msgspec.to_builtins(checkpoint.commit),
        "common": msgspec.to_builtins(checkpoint.common),
        "training": metadata.training,
        "files": [{"name": f.name, "bytes": f.size} for f in metadata.files],
        **{
            part: {
                name: {
                    "dtype": t.logical or t.dtype,
                    "shape": list(t.shape),
                    "bytes": t.nbytes,
                    "shards": len(t.shards),
                    "aliases": list(t.aliases),
                }
                for name, t in metadata.section(part).items()
            }
            for part in sections
        },
    }


def _show_head(checkpoint: Checkpoint) -> None:
    lines = [("path", checkpoint.path), *_progress(checkpoint), *_origin(checkpoint)]
    training = checkpoint.metadata.training
    lines += [(str(k), _short(v)) for k, v in training.items() if isinstance(v, str | int | float | bool | list | dict)]
    width = max(len(k) for k, _ in lines)
    for key, value in lines:
        render.say(f"{key:<{width}}  {value}")


def _progress(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    common = checkpoint.common
    if common is None:
        return [("step", "unknown: weights can be taken from it, a run cannot be resumed")]
    samples = f"{render.human_count(common.consumed_samples)}, {common.global_batch_size} per step"
    return [
        ("step", render.human_count(common.global_step)),
        ("samples", "unknown" if common.position_unknown else samples),
        ("epoch", f"{common.epoch_num}, step {common.step_num} of it"),
        ("loss scale", f"{common.loss_scale:g}"),
        ("healthy", "yes" if checkpoint.healthy else "no"),
    ]


def _origin(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    commit, ranks = checkpoint.commit, f"{checkpoint.ranks} rank{'s' if checkpoint.ranks != 1 else ''}"
    size = ("size", f"{render.human_bytes(checkpoint.size)} in {len(checkpoint.metadata.files)} shard files")
    if commit is None:
        return [("made by", f"{checkpoint.writer}{f' on {ranks}' if checkpoint.kind == 'mindformers' else ''}"), size]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.time))
    parent = f"after save {commit.parent}" if commit.parent else "the first"
    return [
        ("saved", f"{saved} by {commit.writer} on {ranks}"),
        ("run", f"{commit.lineage}, save {commit.sequence} ({parent}), attempt {commit.attempt}"),
        size,
    ]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _show_section(checkpoint: Checkpoint, section: Section, everything: bool) -> None:
    tensors = checkpoint.metadata.section(section)
    if not tensors:
        return
    size = sum(t.nbytes for t in tensors.values())
    render.say()
    render.say(f"{section}: {render.human_count(len(tensors))} tensors, {render.human_bytes(size)}")
    names = list(tensors) if everything else list(tensors)[:_SHOWN]
    render.table(
        ["name", "dtype", "shape", "size", "shards"],
        [_row(name, tensors[name]) for name in names],
        numbers={"size", "shards"},
    )
    if len(names) < len(tensors):
        render.note(f"{render.human_count(len(tensors) - len(names))} more {section} tensors: --all shows them")


def _row(name: str, tensor: TensorRecord) -> tuple[str, ...]:
    shown = f"{name} = {', '.join(tensor.aliases)}" if tensor.aliases else name
    size = render.human_bytes(tensor.nbytes)
    return shown, tensor.logical or tensor.dtype, str(list(tensor.shape)), size, str(len(tensor.shards))
