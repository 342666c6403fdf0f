"""Tables, numbers for people, and colours only where they are wanted."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from perdure.cli import render


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1024**3, "1.00 GiB"),
        (5 * 1024**6, "5.00 EiB"),
        (5000 * 1024**6, "5000.00 EiB"),
    ],
)
def test_bytes(count: int, told: str) -> None:
    assert render.human_bytes(count) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.999, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (86400 * 3 + 3600 * 4, "3 d 04 h"),
    ],
)
def test_seconds(seconds: float, told: str) -> None:
    assert render.human_seconds(seconds) == told


def test_a_table_in_a_pipe_keeps_each_row_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    render.table(["name", "size"], [["a [bold]b", 5], [long, None]], numbers={"size"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "size"], ["a", "[bold]b", "5"], [long, "-"]]
    assert len({len(line) for line in lines}) == 1, "numbers are set to the right"


def test_json_is_one_document_that_keeps_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_json({"path": Path("größe"), "n": [1, None]})
    told = capsys.readouterr().out
    assert "größe" in told
    assert json.loads(told) == {"path": "größe", "n": [1, None]}


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render.colored(_Terminal())
    assert not render.colored(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not render.colored(_Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not render.colored(_Terminal())


def test_progress_is_shown_to_people_and_by_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERDURE_NO_PROGRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stderr", _Terminal())
    assert render.shows_progress()
    monkeypatch.setenv("RANK", "1")
    assert not render.shows_progress()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("PERDURE_NO_PROGRESS", "1")
    assert not render.shows_progress()
    monkeypatch.delenv("PERDURE_NO_PROGRESS")
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not render.shows_progress()


def test_where_no_progress_is_shown_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with render.progress("reading", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_an_error_is_a_sentence_and_a_hint_apart(capsys: pytest.CaptureFixture[str]) -> None:
    render.error("it broke", "mend it")
    render.warn("mind this")
    assert capsys.readouterr() == ("", "error: it broke\n\nhint: mend it\nwarning: mind this\n")
