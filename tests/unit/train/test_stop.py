"""A signal before the first step ends a run, whatever becomes of the exception that it raises."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from perdure.train.stop import Stopped, listen


def test_an_exception_that_was_lost_ends_the_run_before_its_first_step() -> None:
    with listen() as stop:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Stopped) as again:
            stop.finish_steps()
    assert again.value.signal == signal.SIGUSR1


def test_an_error_that_comes_of_it_is_a_stop() -> None:
    def code_of_others() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except BaseException:
            raise AttributeError("half imported") from None

    with pytest.raises(Stopped), listen():
        code_of_others()


def test_an_error_of_a_step_stays_an_error() -> None:
    def step() -> None:
        with listen() as stop:
            stop.finish_steps()
            os.kill(os.getpid(), signal.SIGUSR1)
            raise AttributeError("of the model")

    with pytest.raises(AttributeError):
        step()


def test_a_signal_in_the_middle_of_an_import_ends_the_process_at_once(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(30)\n"
        "except BaseException:\n"
        "    os.abort()\n"
    )
    (tmp_path / "run.yaml").write_text("lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 1e-3}\n")
    source = Path(__file__).parents[3] / "src"
    ended = subprocess.run(
        [sys.executable, "-m", "perdure", "train", "run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 143, ended.stderr
    assert "SIGTERM: stopping before the first step" in ended.stderr


def test_a_process_that_was_forked_meanwhile_and_lives_on_holds_nothing_up() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with listen():
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
    try:
        assert child.is_alive()
        assert not [thread for thread in threading.enumerate() if thread.name == "perdure-signals"]
    finally:
        child.kill()
        child.join()
