"""`perdure export`: an iteration in another program's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from perdure.cli import render

__all__ = ["command"]

FORMATS = ("huggingface", "torch", "torch-dcp")
_DTYPES = ("float32", "bfloat16", "float16")


@click.command("export")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    nargs=2,
    type=(click.Choice(FORMATS), click.Path()),
    metavar="FORMAT TARGET",
    help=f"{', '.join(FORMATS)}, and the directory (torch: the file) to write, which must not exist yet.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="huggingface: convert the weights.")
@click.option("--max-shard-size", help="huggingface: the most bytes of one file, such as `5GB`.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="huggingface: the run's YAML file, for config.json; default: what the run left beside its checkpoints.",
)
@click.option(
    "--rename",
    multiple=True,
    help="A ready map of names, or `PATTERN=>REPLACEMENT`; may be given more than once.",
)
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(
    path: Path,
    target: tuple[str, str],
    dtype: str | None,
    max_shard_size: str | None,
    config_path: Path | None,
    rename: tuple[str, ...],
    as_json: bool,
) -> None:
    """Writes PATH in another format: an iteration directory, or a root (what a resume would take).

    huggingface: safetensors files, index and config.json, for `from_pretrained`. torch: a plain state dictionary in
    one file. torch-dcp: model, optimizer and progress, for `torch.distributed.checkpoint.load`.
    """
    from perdure.convert.state import open_iteration

    kind, name = target
    _only_for_huggingface(kind, dtype=dtype, max_shard_size=max_shard_size, config=config_path)
    with open_iteration(path, [_rule(text) for text in rename], family=kind) as state:
        for note in state.notes:
            render.note(note)
        items = state.items if kind == "torch-dcp" else state.section("model")
        total = sum(item.nbytes for item in items)
        with render.progress(f"export to {kind}", total) as advance:
            if kind == "huggingface":
                _huggingface(state, name, dtype, max_shard_size, config_path, advance)
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


def _only_for_huggingface(kind: str, **options: object) -> None:
    for option, value in options.items():
        if value is not None and kind != "huggingface":
            raise click.UsageError(f"--{option.replace('_', '-')} is for `--to huggingface` only")


def _rule(text: str) -> Any:
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

    if path is None:
        attempt = state.commit.attempt if state.commit is not None else ""
        beside = Path(os.path.dirname(state.root)) / f"config-{attempt}.yaml"
        if not attempt or not beside.is_file():
            return None
        path = beside
    section = load_config(path).model
    model: Mapping[str, Any] = {**section.model_dump(exclude_none=True), **section.extras()}
    kind = model.get("type") or ("transformers" if model.get("model_type") else "decoder")
    if kind == "decoder":
        from perdure.convert.huggingface import llama_config

        return llama_config(model, {item.name: item.shape for item in state.section("model")})
    if kind == "transformers":
        return {k: v for k, v in model.items() if k not in ("type", "params_dtype", "compute_dtype")}
    return None
