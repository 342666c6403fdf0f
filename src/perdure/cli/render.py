"""What a terminal shows. The only module that knows terminals, colours and rich, which it imports on use.

`NO_COLOR` takes the colour away, `PERDURE_NO_PROGRESS` the progress displays; these appear only on a
terminal, and only from rank 0. Nothing here is needed to understand the output: colour only repeats words.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

__all__ = [
    "Advance",
    "colored",
    "error",
    "human_bytes",
    "human_count",
    "human_seconds",
    "note",
    "print_json",
    "progress",
    "say",
    "shows_progress",
    "table",
    "warn",
]

_RED, _YELLOW, _CYAN = "31;1", "33;1", "36;1"
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def say(text: str = "") -> None:
    """One line of data, on stdout."""
    print(text)


def note(text: str) -> None:
    """One line about what is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Something the reader can act on, on stderr."""
    print(_paint("warning:", _YELLOW, sys.stderr), text, file=sys.stderr, flush=True)


def error(message: str, hint: str | None = None) -> None:
    """What went wrong in one sentence; then, after an empty line, what to type or change. On stderr."""
    print(_paint("error:", _RED, sys.stderr), message, file=sys.stderr, flush=True)
    if hint:
        print(f"\n{_paint('hint:', _CYAN, sys.stderr)} {hint}", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """One JSON document on stdout. Paths and other objects are written as their text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Collection[str] = ()) -> None:
    """A table on stdout; on a terminal it fits the width, elsewhere a row is one line whatever its length.

    Args:
        columns: headings.
        rows: one value per column; None is shown as `-`.
        numbers: the headings of columns that are set to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold" if colored(sys.stdout) else "")
    for heading in columns:
        shown.add_column(
            heading, justify="right" if heading in numbers else "left", overflow="fold", no_wrap=not terminal
        )
    for row in rows:
        shown.add_row(*(Text("-" if value is None else str(value)) for value in row))
    # Not a terminal: as wide as it takes, so that other programs can read it line by line.
    console = Console(file=sys.stdout, highlight=False, width=None if terminal else 1 << 15)
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().splitlines():
        print(line.rstrip())


def colored(stream: TextIO) -> bool:
    """Whether `stream` takes colours: a terminal, and nobody said no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shows_progress() -> bool:
    """Whether this process may draw progress: stderr is a terminal, rank 0, `PERDURE_NO_PROGRESS` unset."""
    return (
        sys.stderr.isatty()
        and os.environ.get("PERDURE_NO_PROGRESS", "") in ("", "0")
        and os.environ.get("RANK", "0") == "0"
    )


class Advance(Protocol):
    """Tells a progress display that `amount` more bytes are done."""

    def __call__(self, amount: int) -> None: ...


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """A bar over `total` bytes on stderr while the block runs; nothing where progress is not shown."""
    if not shows_progress():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}", markup=False)
    bar = Progress(
        text,
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)

        def advance(amount: int) -> None:
            bar.advance(task, amount)

        yield advance


def human_bytes(count: int) -> str:
    """`count` bytes for people: `17 B`, `1.50 KiB`, `2.00 GiB`."""
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if abs(value) < 1023.995 or unit == _UNITS[-1]:
            break
    return f"{value:.2f} {unit}"


def human_seconds(seconds: float) -> str:
    """A duration for people: `0.12 s`, `48 s`, `3 min 20 s`, `2 h 05 min`, `3 d 04 h`."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def human_count(count: int) -> str:
    """A number with its thousands apart: `1,234,567`."""
    return f"{count:,}"


def _paint(word: str, code: str, stream: TextIO) -> str:
    return f"\x1b[{code}m{word}\x1b[0m" if colored(stream) else word
