"""What a file can have wrong: every fault at its place, all in one go."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.config.load import load_config, load_config_mapping
from perdure.config.schema import TrainConfig
from perdure.errors import ConfigError, UsageError

Load = Callable[..., TrainConfig]
Lines = Callable[..., list[str]]


def test_all_faults_in_one_go_in_the_order_of_the_file(lines: Lines) -> None:
    text = (
        "training: {steps: many, global_batch_size: 66, local_batch_size: 4}\n"
        "load_path: old\n"
        "checkpoint:\n"
        "  save_interleave_steps: 5\n"
        "  save_max: 0\n"
        "  prefix: a\n"
        "  prefix: b\n"
        "monitor: {health_checkpoint: {on_spik: mark}}\n"
        "callbacks: [{type: A, x: 1}, {x: 2}, 3]\n"
        "5: x\n"
    )
    assert lines(text) == [
        "run.yaml:1:12: training.steps: expected an integer, found the text 'many'",
        "run.yaml:1:25: training.global_batch_size: expected a multiple of local_batch_size (4), found 66; "
        "nearest: 64 or 68",
        "run.yaml:2:1: load_path: unknown key; it belongs to checkpoint.load_path",
        "run.yaml:4:3: checkpoint.save_interleave_steps: unknown key; did you mean save_interleaved_steps?",
        "run.yaml:5:3: checkpoint.save_max: expected at least 1, found 0",
        "run.yaml:7:3: checkpoint.prefix: written twice; first on line 6",
        "run.yaml:8:31: monitor.health_checkpoint.on_spik: unknown key; did you mean on_spike?",
        "run.yaml:9:30: callbacks[1].type: missing",
        "run.yaml:9:38: callbacks[2]: expected a mapping of keys to values, found 3",
        "run.yaml:10:1: [5]: expected a name as key, found 5",
    ]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("load_path: x", "load_path: unknown key; it belongs to checkpoint.load_path"),
        ("training: {load_path: x}", "training.load_path: unknown key; it belongs to checkpoint.load_path"),
        ("train_dataset: {shuffle: true}", "unknown key; it belongs to train_dataset.dataloader.shuffle"),
        ("monitor: {log_interval: 1}", "unknown key; it belongs to monitor.tensorboard.log_interval"),
        ("optimizer: {lr: 1}", "optimizer.lr: unknown key; it belongs to lr_scheduler.learning_rate"),
        ("training: {max_steps: 5}", "training.max_steps: unknown key; it is called training.steps"),
        (
            "training: {save_steps: 5}",
            "training.save_steps: unknown key; it is called checkpoint.save_interleaved_steps",
        ),
        ("training: {epochs: 5}", "training.epochs: unknown key; a run is as long as training.steps says"),
        ("checkpoint: {AUTO_RESUME: true}", "checkpoint.AUTO_RESUME: unknown key; did you mean auto_resume?"),
        (
            "output_dir: '${oc.env:X}/a'",
            "${oc.env:X} is not filled in (a shell does so on the command line), found the text '${oc.env:X}/a'",
        ),
        (
            "output_dir: |\n  out\n",
            "expected a path without line breaks and other control characters, found the text 'out\\n'",
        ),
        ("trainning: {}", "trainning: unknown key; did you mean training?"),
        ("save_interleaved_step: 5", "unknown key; did you mean checkpoint.save_interleaved_steps?"),
        ("nothing_like_it: 5", "nothing_like_it: unknown key"),
        ("checkpoint: 5", "checkpoint: expected a mapping of keys to values, found 5"),
        ("checkpoint: []", "checkpoint: expected a mapping of keys to values, found []"),
        ("callbacks: {type: A}", "callbacks: expected a list of mappings, found a mapping"),
        ("output_dir: ''", "output_dir: expected a path, found an empty text"),
        ("monitor: {tensorboard: {3: x}}", "monitor.tensorboard[3]: expected a name as key, found 3"),
    ],
)
def test_a_key_that_is_wrong_here(text: str, end: str, lines: Lines) -> None:
    (line,) = lines(text)
    assert line.startswith("run.yaml:1:")
    assert line.endswith(end)


def test_a_schedule_is_required(lines: Lines) -> None:
    assert lines("training: {steps: 5}", complete=True) == ["run.yaml: lr_scheduler.type: missing"]
    assert lines("lr_scheduler: {learning_rate: 1}", complete=True) == ["run.yaml:1:1: lr_scheduler.type: missing"]


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        ("type: CosineWithWarmUp", "; did you mean CosineWithWarmUpLR?"),
        ("type: CosineWithWarmUpLR, warmup_rate: 0.1", "of CosineWithWarmUpLR; did you mean warmup_ratio?"),
        ("type: ConstantWarmUpLR, weight_decay: 0.1", "unknown key; it belongs to optimizer.weight_decay"),
        ("type: CosineWithWarmUpLR, warmup_ratio: 1.5", "warmup_ratio: expected at most 1, found 1.5"),
        ("type: CosineWithWarmUpLR, warmup_steps: 2.5", "warmup_steps: expected an integer, found 2.5"),
        ("type: CosineWithWarmUpLR, warmup_steps: 5, decay_steps: 5", "expected more than warmup_steps (5), found 5"),
        ("type: CosineAnnealingWarmRestarts", "t_0: missing; CosineAnnealingWarmRestarts requires t_0"),
        ("type: 5", "lr_scheduler.type: expected text, found 5; put it in quotes"),
    ],
)
def test_keys_of_a_schedule_are_those_of_its_type(schedule: str, end: str, lines: Lines) -> None:
    (line,) = lines(f"lr_scheduler: {{{schedule}}}", complete=True)
    assert line.startswith("run.yaml:1:")
    assert line.endswith(end)


def test_a_schedule_by_import_path_takes_any_key(load: Load) -> None:
    section = load("lr_scheduler: {type: 'my.module:Rate', anything: [1]}", complete=True).lr_scheduler
    assert section.extras() == {"anything": [1]}


def test_whole_numbers_of_a_schedule_become_integers(load: Load) -> None:
    text = "lr_scheduler: {type: CosineWithWarmUpLR, warmup_steps: 1e1, decay_steps: null}"
    assert load(text, complete=True).lr_scheduler.extras() == {"warmup_steps": 10, "decay_steps": None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "run.yaml: empty; expected sections such as training, model and checkpoint"),
        (b"# only this\n", "run.yaml: empty; expected sections such as training, model and checkpoint"),
        (b"- a\n", "run.yaml: expected a mapping of sections at the top, found ['a']"),
        (b"text\n", "run.yaml: expected a mapping of sections at the top, found the text 'text'"),
        (b"\xef\xbb\xbftraining: {}\n", "run.yaml: UTF-8 with a byte order mark; expected plain UTF-8"),
        ("training: {}\n".encode("utf-16"), "run.yaml: UTF-16; expected plain UTF-8"),
        (b"a: 1\nb: \xff\n", "run.yaml:2:4: the byte 0xff is not UTF-8; expected a text file"),
        (b"a: 1\nb: \x00\n", "run.yaml:2:4: not YAML: the character U+0000"),
        (b"a: [\n", "run.yaml:2:1: not YAML: while parsing a flow node: expected the node content, "),
        (b"[" * 5000, "run.yaml:1:65: nested deeper than 64 levels"),
        (b"#" * (5 << 20), "run.yaml: larger than 4 MiB; expected a configuration file"),
    ],
)
def test_files_that_are_no_configuration(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml")
    assert caught.value.message.startswith(message)
    assert "\n" not in caught.value.message


def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.yaml", "loop.yaml")
    for path, words in [
        (".", "is a directory"),
        ("none.yaml", "No such file"),
        ("loop.yaml", "cannot be read"),
        ("a\0b", "expected a path as text without NUL characters"),
        ("x" * 5000, "cannot be read: File name too long"),
    ]:
        with pytest.raises(UsageError, match=words):
            load_config(path)


def test_faults_found_later_carry_the_place_of_their_key(load: Load) -> None:
    config = load("training: {seed: 4}\nmodel:\n  hidden_size: 3\ncallbacks:\n- {type: A}\n", "optimizer.eps=1e-7")
    assert config.fault("model.hidden_size", "too small").message == "run.yaml:3:3: model.hidden_size: too small"
    assert config.fault("model.layers", "missing").message == "run.yaml:2:1: model.layers: missing"
    assert config.fault("callbacks[0].type", "unknown").message == "run.yaml:5:4: callbacks[0].type: unknown"
    assert config.fault("optimizer.eps", "no").message == "command line: optimizer.eps=1e-7: no"
    assert config.fault("monitor.x", "no").message == "run.yaml: monitor.x: no"
    both = config.faults([("optimizer.eps", "b"), ("training.seed", "a")], hint="h")
    assert both.message == "run.yaml:1:12: training.seed: a\ncommand line: optimizer.eps=1e-7: b"
    assert both.hint == "h"


def test_what_must_be_described_unless_it_is_passed(load: Load) -> None:
    config = load("training: {seed: 4}")
    config.require()
    with pytest.raises(ConfigError) as caught:
        config.require(model=True, train_dataset=True)
    assert [line.split(": ")[1] for line in caught.value.message.splitlines()] == [
        "model.type",
        "train_dataset.dataloader.type",
    ]
    load("model: {model_type: qwen3}\ntrain_dataset: {dataloader: {type: Text}}").require(
        model=True, train_dataset=True
    )
    with pytest.raises(ConfigError, match=r"eval_interleaved_steps: expected an eval_dataset section for it, or 0"):
        load("training: {eval_interleaved_steps: 3}").require(eval_dataset=True)
    with pytest.raises(ConfigError, match=r"eval_dataset\.dataloader\.type: missing"):
        load("eval_dataset: {prefetch_size: 1}").require(eval_dataset=True)


def test_a_mapping_is_told_by_key_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_mapping({"lr_scheduler": {"type": "ConstantWarmUpLR"}, "training": {"steps": "5"}, "chekpoint": {}})
    assert caught.value.message.splitlines() == [
        "chekpoint: unknown key; did you mean checkpoint?",
        "training.steps: expected an integer, found the text '5'; remove the quotes",
    ]
    with pytest.raises(ConfigError, match="expected a mapping of sections, found nothing"):
        load_config_mapping(None)  # type: ignore[arg-type]
