"""The page of commands, written from the commands themselves.

`python -m perdure.cli.reference > docs/reference/cli.md`
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

import click

from perdure.cli.main import LazyGroup, cli

__all__ = ["page"]

_HEAD = """\
# Command line

<!-- Generated from the commands by `python -m perdure.cli.reference`; edit their help texts. -->

Data go to stdout, everything else to stderr. With `--json`, stdout holds one JSON document and nothing else. An error
is one sentence, an empty line, and `hint:` with what to type or change. `python -m perdure` is the same program; that
is how torchrun starts it.

## Exit codes

| code | meaning |
| --- | --- |
| 0 | fine; for `diff`: equal; for `verify`: as written |
| 1 | damage found, checkpoints differ, or the run failed |
| 2 | usage or configuration |
| 10 | no such root or iteration, or nothing committed in it |
| 11 | the format is newer than this program |
| 12 | another living writer holds the root |
| 130, 143, 138 | training was stopped by SIGINT, SIGTERM or SIGUSR1, after saving |
| 141 | the reader of stdout has gone (`perdure ... \\| head`) |

Any other code is to be treated as failure. torchrun itself ends with 1 whatever its ranks ended with.

## Environment

| variable | effect |
| --- | --- |
| `NO_COLOR` | no colour |
| `PERDURE_NO_PROGRESS` | no progress line and no bars; these appear only on a terminal and only from rank 0 |
| `PERDURE_RANK_DEADLINE` | seconds that an exchange between ranks may take (300); then the missing rank is named |
| `PERDURE_STOP_DEADLINE` | seconds that a step may take once a signal asked to stop (600); then it is left unsaved |
| `PERDURE_SAVE_DEADLINE` | seconds that rank 0 waits for the other ranks' part of a save (3600) |
| `PERDURE_SHARED_DEADLINE` | seconds in which every rank must see what rank 0 writes below `save_path` (30) |
| `PERDURE_TRACEBACK` | `1`: an error is preceded by the traceback of where it came from |
"""


def page() -> str:
    """The whole page, ending in a newline."""
    return "\n".join([_HEAD, *_group(cli, click.Context(cli, info_name="perdure"))]).rstrip("\n") + "\n"


def _group(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, LazyGroup):
            yield from _group(command, inner)
        else:
            yield from _command(command, inner)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    words = [piece for each in command.params for piece in each.get_usage_pieces(context)]
    options = [each for each in command.params if isinstance(each, click.Option)]
    yield f"## {context.command_path}\n"
    yield f"```sh\n{' '.join([context.command_path, *(['[OPTIONS]'] if options else []), *words])}\n```\n"
    for paragraph in re.split(r"\n\s*\n", (command.help or "").strip()):
        yield textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False, break_long_words=False) + "\n"
    if options:
        yield "| option | meaning |\n| --- | --- |"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.opts)
            yield f"| {names} | {_meaning(option)} |"
        yield ""


def _meaning(option: click.Option) -> str:
    told = (option.help or "").rstrip(".")
    if isinstance(option.type, click.Choice):
        told += f" ({', '.join(f'`{each}`' for each in option.type.choices)})"
    if option.required:
        told += "; required"
    elif not option.is_flag and isinstance(option.default, str | int):
        told += f"; default `{option.default}`"
    return told


if __name__ == "__main__":
    click.echo(page(), nl=False)
