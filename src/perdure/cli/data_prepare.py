"""`perdure data prepare`: text in, one token file out."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from perdure.cli import render
from perdure.cli.paths import FilePath
from perdure.data.prepare import prepare

__all__ = ["command"]


@click.command("prepare")
@click.argument("inputs", nargs=-1, required=True, type=FilePath(path_type=Path))
@click.option("-o", "--output", required=True, type=FilePath(path_type=Path), help="The token file, named `*.bin`.")
@click.option(
    "--tokenizer", default="bytes", help="`bytes`, or the path of a `tokenizers` JSON file.", show_default=True
)
@click.option("--dtype", type=click.Choice(["uint16", "uint32"]), help="Default: the smaller one that fits.")
@click.option("--separator", help="The token after each document; default: the tokenizer's end-of-text token.")
@click.option("--json", "as_json", is_flag=True, help="Say what was written as JSON.")
def command(
    inputs: tuple[Path, ...], output: Path, tokenizer: str, dtype: str | None, separator: str | None, as_json: bool
) -> None:
    """Writes the UTF-8 files and folders INPUTS as one token file, with a JSON file beside it."""
    info = prepare(inputs, output, tokenizer=tokenizer, dtype=dtype, separator=separator)
    target = output if output.suffix == ".bin" else output.with_name(f"{output.name}.bin")
    if as_json:
        render.print_json({"path": str(target), **msgspec.to_builtins(info)})
    else:
        render.say(
            f"{target}: {render.human_count(info.tokens)} tokens of {info.documents} documents, {info.dtype}, "
            f"vocabulary {render.human_count(info.vocab_size)}"
        )
