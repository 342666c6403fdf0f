"""`perdure export`: an iteration in another program's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from perdure.cli import render
from perdure.cli.paths import FilePath

__all__ = ["command"]

FORMATS = ("huggingface", "mindformers", "torch", "torch-dcp")
RENAME_HELP = (
    "A ready map of names, `PATTERN=>REPLACEMENT`, or a split or join as in checkpoint.rename; may be repeated."
)
_DTYPES = ("float32", "bfloat16", "float16")


@click.command("export")
@click.argument("path", type=FilePath(path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    nargs=2,
    type=(click.Choice(FORMATS), FilePath()),
    metavar="FORMAT TARGET",
    help=f"{', '.join(FORMATS)}, and the directory (torch: the file) to write, which must not exist yet.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="huggingface: convert the weights.")
@click.option("--max-shard-size", help="huggingface: the most bytes of one file, such as `5GB`.")
@click.option(
    "--config",
    "config_path",
    type=FilePath(path_type=Path),
    help="huggingface: the run's YAML file, for config.json; default: what the run left beside its checkpoints.",
)
@click.option("--ranks", type=click.IntRange(min=1), help="mindformers: how many ranks to cut for; default: 1.")
@click.option("--rename", multiple=True, help=RENAME_HELP)
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(
    path: Path,
    target: tuple[str, str],
    dtype: str | None,
    max_shard_size: str | None,
    config_path: Path | None,
    ranks: int | None,
    rename: tuple[str, ...],
    as_json: bool,
) -> None:
    """Writes PATH in another format: an iteration directory, or a root (what a resume would take).

    huggingface: safetensors files, index and config.json, for `from_pretrained`. mindformers: a root of MindSpore
    Transformers with weights, AdamW's state and progress. torch: a plain state dictionary in one file. torch-dcp:
    model, optimizer, registered objects and progress, for `torch.distributed.checkpoint.load`.
    """
    from perdure.convert.memory import return_freed_memory
    from perdure.convert.state import open_iteration

    return_freed_memory()
    kind, name = target
    _only_for("huggingface", kind, dtype=dtype, max_shard_size=max_shard_size, config=config_path)
    _only_for("mindformers", kind, ranks=ranks)
    with open_iteration(path, [rule(text) for text in rename], family=kind) as state:
        _look_at_base(state, kind)
        for note in state.notes:
            render.note(note)
        items = state.items if kind in ("torch-dcp", "mindformers") else state.section("model")
        total = sum(item.nbytes for item in items)
        with render.progress(f"export to {kind}", total) as advance:
            if kind == "huggingface":
                _huggingface(state, name, dtype, max_shard_size, config_path, advance)
            elif kind == "mindformers":
                from perdure.convert.mindformers import write_mindformers

                for left_out in write_mindformers(state, name, ranks=ranks or 1, advance=advance):
                    render.warn(left_out)
            elif kind == "torch":
                from perdure.convert.torchfile import write_torch

                write_torch(state, name, advance=advance)
            else:
                from perdure.convert.dcp import write_dcp

                write_dcp(state, name, advance=advance)
        said = {"from": state.where, "to": name, "format": kind, "tensors": len(items), "bytes": total}
    if as_json:
        render.print_json(said)
    else:
        render.say(f"{name}: {len(items)} tensors, {render.human_bytes(total)}, from {said['from']}")


def _look_at_base(state: Any, kind: str) -> None:
    """An adapter saved alone is no model that another program could open."""
    from perdure.errors import MismatchError

    base = state.training.get("base")
    if not isinstance(base, dict):
        return
    text = f"{state.where} holds an adapter without the weights below it, which are in {base.get('path')}"
    if kind in ("huggingface", "mindformers"):
        raise MismatchError(text, hint=f"export those: perdure export {base.get('path')} --to {kind} DIR")
    render.warn(text)


def _only_for(wanted: str, kind: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None and kind != wanted:
            raise click.UsageError(f"--{option.replace('_', '-')} is for `--to {wanted}` only")


def rule(text: str) -> Any:
    """A `--rename` as a rule of `checkpoint.rename`."""
    from perdure.config.yaml12 import YAMLText, parse_override

    if text.startswith(("{", "[")):
        try:
            return parse_override(text)
        except YAMLText as error:
            raise click.UsageError(f"--rename: {error.problem.text}") from None
    pattern, arrow, replacement = text.partition("=>")
    return [pattern, replacement] if arrow else text


def _huggingface(
    state: Any, name: str, dtype: str | None, size: str | None, config_path: Path | None, advance: Any
) -> None:
    from perdure.config.kinds import parse_byte_size
    from perdure.convert.huggingface import LARGEST, write_huggingface

    try:
        largest = parse_byte_size(size or "") or LARGEST
    except ValueError as error:
        raise click.UsageError(f"--max-shard-size: {error}") from None
    config = _config(state, config_path)
    if config is None:
        render.warn("no config.json is written: the run's configuration was not found; name it with --config")
    write_huggingface(state, name, dtype=dtype or "", largest=largest, config=config, advance=advance)


def _config(state: Any, path: Path | None) -> dict[str, Any] | None:
    """What config.json is to say, or None where the model's description isn't known."""
    from perdure.config.load import load_config

    if path is None and isinstance(state.training.get("config"), dict):
        # Imported with its own.
        return dict(state.training["config"])
    if path is None:
        attempt = state.commit.attempt if state.commit is not None else ""
        beside = Path(os.path.dirname(state.root)) / f"config-{attempt}.yaml"
        if not attempt or not beside.is_file():
            return None
        path = beside
    section = load_config(path).model
    model: Mapping[str, Any] = {**section.model_dump(exclude_none=True), **section.extras()}
    kind = model.get("type") or ("transformers" if model.get("model_type") else "decoder")
    shapes = {item.name: item.shape for item in state.section("model")}
    if kind == "decoder" and "model.embed_tokens.weight" in shapes:
        from perdure.convert.huggingface import llama_config

        return llama_config(model, shapes)
    if kind == "transformers":
        from perdure.convert.huggingface import transformers_config

        return transformers_config(model, shapes)
    return None
