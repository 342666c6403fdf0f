"""What every command shares: help without imports, errors as one sentence and a hint, exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from perdure import __version__, errors
from perdure.cli import main as cli_main
from perdure.cli.main import COMMANDS, LazyGroup, cli, run


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """A command `fail` that raises what the list holds."""
    given: list[BaseException] = []

    @click.command("fail")
    def fail() -> None:
        raise given[0]

    found = LazyGroup.get_command
    monkeypatch.setattr(LazyGroup, "list_commands", lambda self, ctx: [*self.table, "fail"])
    monkeypatch.setattr(
        LazyGroup, "get_command", lambda self, ctx, name: fail if name == "fail" else found(self, ctx, name)
    )
    return iter([given])


def perdure(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perdure", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_lists_each_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    told = capsys.readouterr().out
    for name in cli.list_commands(click.Context(cli)):
        assert f"  {name} " in told
        assert COMMANDS[name][1].split(";")[0] in told


def test_each_listed_command_can_be_imported_and_has_help() -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert isinstance(command, click.Command)
        assert command.help


def test_help_and_version_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from perdure.cli.main import run; "
        "codes = [run(['--help']), run(['--version']), run(['nothing'])]; "
        "assert codes == [0, 0, 2], codes; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "rich", "pydantic"} & set(done.stdout.splitlines()[-1].split())


def test_version() -> None:
    done = perdure("--version")
    assert (done.returncode, done.stdout) == (0, f"perdure {__version__}\n")


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "Commands" in told.err


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dat"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: no command `dat`; did you mean `data`?\n\nhint: see `perdure --help`\n"


def test_a_file_for_a_command_is_probably_to_be_trained_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").touch()
    assert run(["run.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: no command `run.yaml`; did you mean `train run.yaml`?")


def test_unknown_option_is_told_in_our_manner(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--bogus"]) == 2
    assert capsys.readouterr().err.startswith("error: no such option `--bogus`")


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "s3://bucket/run"],
        ["data", "prepare", "a.txt", "-o", "gs://bucket/a.bin"],
        ["export", "run", "--to", "huggingface", "hdfs://host/weights"],
    ],
)
def test_an_address_is_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert "is an address; expected a path of a mounted file system" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PerdureError("it broke", hint="mend it"), 1),
        (errors.ConfigError("it broke", hint="mend it"), 2),
        (errors.CheckpointNotFoundError("it broke", hint="mend it"), 10),
        (errors.FormatTooNewError("it broke", hint="mend it"), 11),
        (errors.RootLockedError("it broke", hint="mend it"), 12),
    ],
)
def test_our_errors_are_a_sentence_a_hint_and_a_code(
    raising: Iterator[list[BaseException]], capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    next(raising).append(error)
    assert run(["fail"]) == code
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "error: it broke\n\nhint: mend it\n"


def test_an_unexpected_error_says_how_to_see_more(
    raising: Iterator[list[BaseException]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    next(raising).append(ZeroDivisionError("by\nnought"))
    monkeypatch.delenv("PERDURE_TRACEBACK", raising=False)
    assert run(["fail"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: unexpected ZeroDivisionError: by nought\n\nhint:")
    assert "PERDURE_TRACEBACK=1" in told
    assert "Traceback" not in told
    monkeypatch.setenv("PERDURE_TRACEBACK", "1")
    assert run(["fail"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(raising: Iterator[list[BaseException]]) -> None:
    next(raising).append(KeyboardInterrupt())
    assert run(["fail"]) == 130


def test_a_pipe_that_broke_elsewhere_is_not_hushed_up(
    raising: Iterator[list[BaseException]], capsys: pytest.CaptureFixture[str]
) -> None:
    next(raising).append(BrokenPipeError(errno.EPIPE, "worker 3"))
    assert run(["fail"]) == 1
    assert "worker 3" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_quiet(unbuffered: str) -> None:
    code = "import sys; from perdure.cli.main import run; sys.exit(run(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_data_prepare_writes_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text\n", encoding="utf-8")
    assert run(["data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "tokens.bin"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(tmp_path / "tokens.bin")
    assert told["tokens"] == len("some text\n") + 1
    assert (tmp_path / "tokens.bin").stat().st_size == told["tokens"] * 2


def test_data_prepare_without_input_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", str(tmp_path / "none.txt"), "-o", str(tmp_path / "tokens.bin")]) != 0
    assert "none.txt" in capsys.readouterr().err
    assert not (tmp_path / "tokens.bin").exists()


def test_the_entry_point_leaves_with_the_code() -> None:
    with pytest.raises(SystemExit) as left:
        cli_main.main(["nothing"])
    assert left.value.code == 2
