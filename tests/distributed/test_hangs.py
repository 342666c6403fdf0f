"""No rank ever waits for another one for ever, and every end names who failed and what it did last."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.distributed import jobs

TROUBLE = "callbacks: [{type: 'tests.distributed.trouble:Trouble', kind: KIND}]\n"


def config(folder: Path, trouble: str = "", more: str = "") -> Path:
    text = jobs.CONFIG + (TROUBLE.replace("KIND", trouble) if trouble else "") + more
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


@pytest.mark.parametrize(
    ("trouble", "code", "text"),
    [
        pytest.param(
            "raise",
            1,
            "callback Trouble.on_step_end failed at step 3: ValueError: the user's own words",
            marks=pytest.mark.slow,
        ),
        ("stuck", 1, "callback Trouble.on_step_end failed at step 3: ValueError: the user's own words"),
        pytest.param(
            "raise, hook: on_train_begin", 1, "callback Trouble.on_train_begin failed at step 0", marks=pytest.mark.slow
        ),
        pytest.param(
            "raise, hook: on_train_end", 1, "callback Trouble.on_train_end failed at step 12", marks=pytest.mark.slow
        ),
        ("raise, rank: 0", 1, "rank 0 failed at step 3"),
        pytest.param(
            "interrupt", 130, "rank 1 failed at step 3 while training: KeyboardInterrupt", marks=pytest.mark.slow
        ),
        pytest.param("exit", 7, "rank 1 failed at step 3 while training: SystemExit", marks=pytest.mark.slow),
        ("kill", -9, "is gone without a word (killed, or out of memory); it was last step 3: training"),
    ],
)
def test_what_ends_one_rank_ends_all_and_they_say_why(tmp_path: Path, trouble: str, code: int, text: str) -> None:
    job = jobs.start(config(tmp_path, trouble), tmp_path / "run")
    victim = 0 if "rank: 0" in trouble else 1
    codes = job.wait(100)
    assert codes[victim] == code, job.told
    assert codes[1 - victim] == 1, job.told
    other = job.told[1 - victim]
    assert f"error: rank {victim}" in other
    assert text in other
    assert "Traceback" not in other
    assert "terminate called" not in other


@pytest.mark.parametrize(
    ("trouble", "last"),
    [("hang", "step 3: training for"), pytest.param("stop", "sign of life", marks=pytest.mark.slow)],
)
def test_a_rank_that_hangs_is_named_with_what_it_did_last(tmp_path: Path, trouble: str, last: str) -> None:
    job = jobs.start(config(tmp_path, trouble), tmp_path / "run", PERDURE_RANK_DEADLINE="6")
    end = time.monotonic() + 80
    while job.ranks[0].poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    code, told = job.ranks[0].poll(), job.told[0]
    job.kill()
    assert code == 1, told
    assert "rank 1 on " in told
    assert last in told


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    job = jobs.start(config(tmp_path), tmp_path / "run", size=3, ranks=(0, 2), PERDURE_RANK_DEADLINE="5")
    assert job.wait(100) == [1, 1]
    assert "rank 1 did not join within 5 s" in job.told[0]
    assert "rank 1 did not join within 5 s" in job.told[1]
    job = jobs.start(config(tmp_path), tmp_path / "run", size=2, ranks=(1,), PERDURE_RANK_DEADLINE="3")
    assert job.wait(100) == [1]
    assert "could not reach rank 0's store at 127.0.0.1:" in job.told[0]


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_full_disk_on_one_rank_is_told_although_nothing_can_be_written_about_it(
    tmp_path: Path, background: bool
) -> None:
    more = {"module": "tests.distributed.slow", "PERDURE_TEST_FULL_RANK": "1"}
    run = config(tmp_path)
    job = jobs.start(run, tmp_path / "run", f"checkpoint.async_save={str(background).lower()}", **more)
    assert job.wait(100) == [1, 1], job.told
    for told in job.told:
        assert "step 4 could not be saved" in told
        assert "No space left on device" in told
    assert not list((tmp_path / "run" / "checkpoint").glob("iteration_*"))
