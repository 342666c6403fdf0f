"""The audit proves chains of restarts, and names what is repeated, missing or swapped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from perdure.cli.main import run as perdure
from perdure.data.mixture import Mixture
from perdure.data.order import EpochOrder
from perdure.data.samples import sample_word
from perdure.errors import DataError
from perdure.format.keys import MASK
from perdure.train.audit import AuditReport, audit
from perdure.train.compare_ledgers import compare
from perdure.train.ledger import read_ledger

STEPS, SEED = 18, 3


def kinds(report: AuditReport) -> list[str]:
    return [finding.kind for finding in report.findings]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    tiny.trainer(output, STEPS).train()
    return output


@pytest.fixture
def planted(straight: Path, tmp_path: Path) -> Callable[[int, Callable[[dict[str, Any]], Any]], Path]:
    """A copy of the straight run without its checkpoints, one step of whose ledger is changed."""

    def plant(number: int, change: Callable[[dict[str, Any]], Any]) -> Path:
        output = tmp_path / "planted"
        output.mkdir()
        lines = [json.loads(line) for line in (straight / "ledger.jsonl").read_text().splitlines()]
        changed = change(lines[number])
        lines[number : number + 1] = lines[number : number + 1] if changed is None else changed
        (output / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return output

    return plant


def add(line: dict[str, Any], *words: int) -> None:
    line["ids"] = f"{(int(line['ids'], 16) + sum(words)) & MASK:016x}"


def test_a_straight_run_is_clean_and_its_checkpoints_vouch_for_it(straight: Path) -> None:
    report = audit(str(straight))
    assert report.ok, report.findings
    assert (report.steps, report.first, report.last, report.attempts) == (STEPS, 0, 4 * STEPS, 1)
    assert report.commits == 3
    assert report.recomputed
    assert not report.notes


def test_one_repeated_sample_is_named(planted: Any) -> None:
    order = EpochOrder(tiny.LENGTH, SEED).slice(16, 20)

    def repeat(line: dict[str, Any]) -> None:
        assert line["samples"] == [16, 20]
        add(line, sample_word(18, order[1]), -sample_word(18, order[2]))

    report = audit(str(planted(5, repeat)))
    assert kinds(report) == ["repeated"]
    finding = report.findings[0]
    assert (finding.step, finding.samples, finding.index) == (5, (18, 19), order[2])
    assert f"sample {order[1]} is repeated at stream position 18, where {order[2]} is missing" in finding.what


def test_one_missing_sample_is_named(planted: Any) -> None:
    order = EpochOrder(tiny.LENGTH, SEED).slice(16, 20)
    report = audit(str(planted(5, lambda line: add(line, -sample_word(19, order[3])))))
    assert kinds(report) == ["missing"]
    assert (report.findings[0].samples, report.findings[0].index) == ((19, 20), order[3])


def test_one_extra_sample_is_named(planted: Any) -> None:
    report = audit(str(planted(5, lambda line: add(line, sample_word(17, 30)))))
    assert kinds(report) == ["repeated"]
    assert "sample 30 was had once more" in report.findings[0].what


def test_swapped_samples_are_named(planted: Any) -> None:
    order = EpochOrder(tiny.LENGTH, SEED).slice(16, 20)
    change = (
        sample_word(16, order[3]),
        sample_word(19, order[0]),
        -sample_word(16, order[0]),
        -sample_word(19, order[3]),
    )
    report = audit(str(planted(5, lambda line: add(line, *change))))
    assert kinds(report) == ["swapped"]
    assert "stream positions 16 and 19" in report.findings[0].what


def test_a_sample_of_another_place_and_several_are_told_apart(planted: Any) -> None:
    order = EpochOrder(tiny.LENGTH, SEED).slice(0, 20)
    report = audit(str(planted(5, lambda line: add(line, sample_word(17, order[2]), -sample_word(17, order[17])))))
    assert kinds(report) == ["replaced"]
    assert report.findings[0].index == order[17]


def test_more_than_one_wrong_sample_is_said(planted: Any) -> None:
    report = audit(str(planted(5, lambda line: line.update(ids=f"{12345:016x}"))))
    assert kinds(report) == ["other samples"]


def test_a_lost_step_and_one_done_twice_are_found(planted: Any) -> None:
    report = audit(str(planted(5, lambda line: [])))
    assert kinds(report) == ["step", "missing"]
    assert report.findings[1].samples == (16, 20)


def test_a_step_done_twice_is_found(planted: Any) -> None:
    report = audit(str(planted(5, lambda line: [line, line])))
    assert kinds(report) == ["step", "repeated", "step", "missing"][: len(kinds(report))]
    assert "repeated" in kinds(report)


def test_all_steps_of_the_first_start_that_are_lost_are_found(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    tiny.trainer(tmp_path, 8).train()
    shutil.rmtree(tmp_path / "checkpoint")
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join([lines[0], *lines[6:]]))
    report = audit(str(tmp_path))
    assert [(finding.kind, finding.samples) for finding in report.findings] == [("missing", (0, 20))]
    # Without the head, that start was in another ledger, for all that this one says.
    (tmp_path / "ledger.jsonl").write_text("".join(lines[6:]))
    report = audit(str(tmp_path))
    assert report.ok
    assert "begins at stream position 20" in report.notes[0]


def test_a_ledger_that_was_changed_or_cut_is_not_what_the_commits_vouch_for(straight: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(straight, output)
    ledger = output / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole.replace(b'"global_batch_size":4', b'"global_batch_size": 4', 1))
    assert "commit" in kinds(audit(str(output)))
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-3]))
    assert any("steps are lost" in finding.what for finding in audit(str(output)).findings)


def test_a_chain_of_kills_rewinds_and_other_batches_is_clean(tmp_path: Path) -> None:
    output = tmp_path / "run"

    def killed(at: int, **sections: Any) -> None:
        class Kill(tiny.Callback):
            def on_step_end(self, trainer: Any, state: Any) -> None:
                if state.global_step == at:
                    tiny.kill_self()

        def work() -> None:
            tiny.trainer(output, STEPS, callbacks=(Kill(),), **sections).train()

        assert tiny.in_child(work) == -9

    killed(7)
    killed(13, training={"global_batch_size": 6})
    with (output / "ledger.jsonl").open("ab") as file:
        file.write(b'{"attempt":"torn","st')
    assert perdure(["rewind", str(output / "checkpoint"), "--to", "5"]) == 0
    killed(11, training={"skip_ranges": [[34, 39], [60, 61]]})
    tiny.trainer(output, STEPS, training={"global_batch_size": 10, "rampup_batch_size": [2, 4, 90]}).train()
    report = audit(str(output))
    assert report.ok, report.findings
    assert report.attempts == 4
    assert report.returns == 3
    assert report.left_out == 5
    assert report.superseded > 0


def test_data_skips_are_written_down(tmp_path: Path) -> None:
    output = tmp_path / "run"
    tiny.trainer(output, 5).train()
    tiny.trainer(output, 10, data=tiny.Noisy(41), training={"ignore_data_skip": True}).train()
    tiny.trainer(output, 15, data=tiny.Noisy(43), training={"data_skip_steps": 2}).train()
    tiny.trainer(output, 20, data=tiny.Noisy(43), training={"data_skip_steps": 2}).train()
    report = audit(str(output))
    assert report.ok, report.findings
    assert report.left_out == 8
    assert [note.split(" ", 2)[2] for note in report.notes] == [
        "began the data afresh at step 5, on purpose",
        "left out stream positions [20, 28) on purpose (data_skip_steps)",
    ]


def test_growth_is_taken_in_at_the_next_epoch_on_purpose_only(tmp_path: Path) -> None:
    output = tmp_path / "run"
    tiny.trainer(output, 5).train()
    with pytest.raises(DataError, match="length: 37 -> 45") as refused:
        tiny.trainer(output, 10, data=tiny.Noisy(45)).train()
    for way in ("ignore_data_skip", "data_skip_steps", "accept_data_growth"):
        assert way in str(refused.value)
    with pytest.raises(DataError, match="length: 37 -> 30") as refused:
        tiny.trainer(output, 10, data=tiny.Noisy(30)).train()
    assert "accept_data_growth" not in str(refused.value)
    taken_in = tiny.trainer(output, 10, data=tiny.Noisy(45), training={"accept_data_growth": True}).train()
    assert (taken_in.epoch_num, taken_in.step_num) == (1, 0)
    later = tiny.trainer(output, 25, data=tiny.Noisy(45)).train()
    assert (later.epoch_num, later.step_num) == (2, (100 - 37 - 45) // 4)
    report = audit(str(output))
    assert report.ok, report.findings
    assert "taken in from stream position 37 on" in report.notes[0]
    ledger = read_ledger(str(output / "ledger.jsonl"))
    assert [list(pair) for pair in ledger.headers[-1].data.lengths] == [[0, 37], [37, 45]]  # type: ignore[union-attr]


def test_a_mixture_that_is_weighted_anew_from_a_position_on_is_clean(tmp_path: Path) -> None:
    output = tmp_path / "run"
    sources = [tiny.Noisy(37, "a"), tiny.Noisy(50, "b")]
    tiny.trainer(output, 5, data=Mixture(sources, weights=[1, 1])).train()
    wider = Mixture([*sources, tiny.Noisy(20, "c")], weights=[1, 1], changes=[{"at": 40, "weights": [1, 1, 2]}])
    tiny.trainer(output, 80, data=wider).train()
    report = audit(str(output))
    assert report.ok, report.findings
    assert report.last == 320 > 256


def test_other_data_without_a_word_are_found(straight: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    shutil.copytree(straight, output, ignore=shutil.ignore_patterns("checkpoint"))
    head = json.loads((output / "ledger.jsonl").read_text().splitlines()[0])
    parent = head["attempt"]
    head.update(attempt="b", resumed=4, parent_attempt=parent, parent_samples=72, consumed_samples=72, step=STEPS)
    head["data"]["seed"] = 4
    with (output / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(head) + "\n")
        order = EpochOrder(tiny.LENGTH, 4).slice(72, 76)
        ids = sum(sample_word(72 + n, index) for n, index in enumerate(order)) & MASK
        line = {"attempt": "b", "step": STEPS + 1, "global_batch_size": 4, "samples": [72, 76], "ids": f"{ids:016x}"}
        file.write(json.dumps(line) + "\n")
    report = audit(str(output))
    assert kinds(report) == ["data"]
    assert "seed: 3 -> 4" in report.findings[0].what


def test_two_runs_are_compared_whatever_their_batches(straight: Path, tmp_path: Path) -> None:
    other, different = tmp_path / "other", tmp_path / "different"
    tiny.trainer(other, 6, training={"global_batch_size": 10}).train()
    tiny.trainer(different, 4, training={"seed": 4}).train()
    mine = read_ledger(str(straight / "ledger.jsonl"))
    compared = compare(mine, read_ledger(str(other / "ledger.jsonl")))
    assert compared.same
    assert not compared.step_by_step
    assert compared.stretches == 3
    assert compared.only_here == [(60, 72)]
    unlike = compare(mine, read_ledger(str(different / "ledger.jsonl")))
    assert not unlike.same
    assert unlike.step_by_step
    assert [(s.first, s.last) for s in unlike.different] == [(0, 4), (4, 8), (8, 12), (12, 16)]


def test_the_command_says_it_in_words_and_json_without_torch(straight: Path, planted: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = (
        "import sys; from perdure.cli.main import run; code = run(sys.argv[1:]);"
        "sys.exit(50 if 'torch' in sys.modules else code)"
    )

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, "data", "audit", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    clean = call(str(straight), "--against", str(straight))
    assert clean.returncode == 0, clean.stderr
    assert "every sample exactly once" in clean.stdout
    assert "the same samples, step by step" in clean.stdout
    wrong = planted(5, lambda line: add(line, sample_word(17, 30)))
    told = call(str(wrong), "--json")
    assert told.returncode == 1
    document = json.loads(told.stdout)
    assert document["ok"] is False
    assert document["findings"][0]["step"] == 5
    missing = call(str(straight / "nowhere"))
    assert missing.returncode == 2
    assert "there is no ledger" in missing.stderr


def test_a_run_that_goes_back_by_itself_and_is_killed_then_is_clean(tmp_path: Path) -> None:
    bad = EpochOrder(400, SEED).slice(113, 114)[0]

    def spoiled(model: Any, batch: Any) -> Any:
        return tiny.loss_of(model, batch) * (1e4 if bad in batch[0].tolist() else 1.0)

    def start(steps: int, *callbacks: tiny.Callback) -> None:
        given: dict[str, Any] = {"monitor": {"health_checkpoint": {"on_spike": "rollback"}}}
        tiny.trainer(tmp_path, steps, data=tiny.Noisy(400), loss=spoiled, callbacks=callbacks, **given).train()

    class Kill(tiny.Callback):
        def on_rollback(self, trainer: Any, state: Any) -> None:
            tiny.kill_self()

    assert tiny.in_child(lambda: start(36, Kill())) == -9
    start(31)
    start(36)
    report = audit(str(tmp_path))
    assert report.ok, report.findings
    assert report.left_out == 4
    assert report.returns == 2
    assert report.last == 4 * 37
