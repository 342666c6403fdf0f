"""The `perdure` command: lazy sub-commands, and the one place where errors become words and exit codes.

A command lives in a module of its own that defines `command: click.Command` and is imported only when
it is called; what `--help` says about it stands in `COMMANDS`. A command returns its exit code, where
None means 0. Data go to stdout, everything else to stderr.

Exit codes: 0 fine, 1 damage found or run failed, 2 usage or configuration, 10 no such root or iteration,
11 format newer than this program, 12 another writer holds the root, 130/138/143 stopped by a signal,
141 the reader of stdout has gone.
"""

from __future__ import annotations

import difflib
import os
import re
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

import click

from perdure import __version__
from perdure.cli import render
from perdure.errors import PerdureError

__all__ = ["COMMANDS", "LazyGroup", "cli", "main", "run"]

COMMANDS = {
    "train": ("perdure.cli.train", "Train from a YAML file; the same command resumes"),
    "explain": ("perdure.cli.explain", "Say what a resume would do, without doing it"),
    "ls": ("perdure.cli.ls", "List the iterations under a root"),
    "inspect": ("perdure.cli.inspect", "Show what one iteration holds"),
    "verify": ("perdure.cli.verify", "Check iterations; --read-data reads every byte"),
    "diff": ("perdure.cli.diff", "Compare two iterations tensor by tensor"),
    "prune": ("perdure.cli.prune", "Remove old iterations by a policy"),
    "rewind": ("perdure.cli.rewind", "Point a root at an earlier iteration"),
    "data": ("perdure.cli.data", "Prepare training data, and prove how they were used"),
    "export": ("perdure.cli.export", "Write an iteration in another format"),
    "import": ("perdure.cli.import_", "Read another format into an iteration"),
    "reshard": ("perdure.cli.reshard", "Rewrite an iteration for another number of ranks"),
    "bench": ("perdure.cli.bench", "Measure saving and loading on this storage"),
}
"""Command name -> (its module, its one-line help), in the order `--help` lists them."""


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is called.

    Args:
        table: name -> (module that defines `command`, one-line help). A name whose module is not part of
            this version is left out.
    """

    def __init__(self, *arguments: object, table: dict[str, tuple[str, str]], **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _) in self.table.items() if find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(self.table[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], known, n=1)
            near = [f"train {args[0]}"] if os.path.isfile(args[0]) else near
            guess = f"; did you mean `{near[0]}`?" if near else ""
            raise click.UsageError(f"no command `{args[0]}`{guess}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if rows := [(name, self.table[name][1]) for name in self.list_commands(ctx)]:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Data go to stdout, everything else to stderr. Exit codes: 0 fine, 1 damage found or run failed, "
    "2 usage or configuration, 10 not found, 11 newer format, 12 root held by another writer.",
)
@click.version_option(__version__, prog_name="perdure", message="%(prog)s %(version)s")
def cli() -> None:
    """Step-exact resumable training for PyTorch."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; every error is told here, on stderr.

    Args:
        arguments: the words after `perdure`; None takes those of the process.
    """
    try:
        # Not `cli.main`, which takes any broken pipe, a worker's too, for a reader of stdout that has gone.
        words = list(sys.argv[1:] if arguments is None else arguments)
        with cli.make_context("perdure", words) as context:
            code: object = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as left:
        return left.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        render.note(error.format_message())
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "perdure"
        return _tell(_sentence(error), f"see `{path} --help`", error.exit_code)
    except click.ClickException as error:
        return _tell(_sentence(error), None, error.exit_code)
    except PerdureError as error:
        return _tell(error.message, error.hint, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _tell("interrupted", None, 130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            return 141
        if isinstance(error, OSError) and error.filename is not None:
            what = f"{error.filename!s}: {error.strerror or type(error).__name__}"
            return _tell(what, "the system or the storage refused; what was saved before is untouched", 1)
        told = " ".join(str(error).split())
        return _tell(
            f"unexpected {type(error).__name__}{': ' if told else ''}{told[:500]}",
            "set PERDURE_TRACEBACK=1 to see where it came from",
            1,
        )
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `perdure` and of `python -m perdure`."""
    code = run(arguments)
    # A rank of a job has process groups, which do not always survive the interpreter's own end.
    if (joined := sys.modules.get("perdure.engine.join")) is not None:
        joined.end_process(code)
    sys.exit(code)


def _tell(message: str, hint: str | None, code: int) -> int:
    if os.environ.get("PERDURE_TRACEBACK", "") not in ("", "0"):
        import traceback

        traceback.print_exc()
    render.error(message, hint)
    return code


def _sentence(error: click.ClickException) -> str:
    """click's words in our manner: no capital, no full stop, literals in backticks."""
    words = " ".join(error.format_message().split()).rstrip(".").replace(". Choose from: ", "; one of ")
    told = re.sub(r"'([^']*)'", r"`\1`", words)
    return told[:1].lower() + told[1:]


def _reader_has_gone() -> bool:
    """Whether stdout is the pipe that broke; a broken pipe to a worker process must not be hushed up."""
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    watch = select.poll()
    watch.register(stdout, select.POLLOUT)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0)):
        return False
    # What is still buffered would fail once more when the interpreter closes stdout.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True
