"""Words `section.key=value` of the command line: set like the file, checked like the file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.config.schema import TrainConfig

Load = Callable[..., TrainConfig]
Lines = Callable[..., list[str]]


def test_values_are_yaml_and_sections_need_not_be_there(load: Load) -> None:
    config = load(
        "training: {steps: 5}\ncheckpoint: {load_path: old}",
        "training.steps=1e1",
        "train_dataset.dataloader.path=a/b.bin",
        "train_dataset.dataloader.shuffle=true",
        "optimizer.betas=[0.8, 0.9]",
        "checkpoint.load_path=",
        "callbacks=[{type: A, every: 3}]",
        "output_dir=runs/1=2",
        "lr_scheduler.type=CosineWithWarmUpLR",
        "lr_scheduler.warmup_ratio=1e-2",
        "model.rope.theta=1e4",
    )
    assert config.training.steps == 10
    assert config.train_dataset.dataloader.extras() == {"path": "a/b.bin"}
    assert config.train_dataset.dataloader.shuffle is True
    assert config.optimizer.betas == [0.8, 0.9]
    assert config.checkpoint.load_path == ""
    assert [callback.extras() for callback in config.callbacks] == [{"every": 3}]
    assert config.output_dir == "runs/1=2"
    assert config.lr_scheduler.extras() == {"warmup_ratio": 0.01}
    assert config.model.extras() == {"rope": {"theta": 1e4}}


def test_the_later_of_two_words_counts_and_a_section_is_set_whole(load: Load) -> None:
    config = load("training: {steps: 5, seed: 7}", "training.steps=6", "training.steps=7")
    assert (config.training.steps, config.training.seed) == (7, 7)
    config = load("training: {steps: 5, seed: 7}", "training.seed=8", "training={steps: 6}")
    assert (config.training.steps, config.training.seed) == (6, 42)


def test_a_word_mends_what_the_file_has_wrong(load: Load) -> None:
    assert load("training: {steps: many}", "training.steps=5").training.steps == 5


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("training.steps=abc", "expected an integer, found the text 'abc'"),
        ("training.steps='5'", "expected an integer, found the text '5'; remove the quotes"),
        ("training.stepps=5", "unknown key; did you mean steps?"),
        ("chekpoint.load_path=x", "chekpoint: unknown key; did you mean checkpoint?"),
        (
            "output_dir=$HOME/x",
            "expected a path; $HOME is not filled in (a shell does so on the command line), found the text '$HOME/x'",
        ),
        ("load_path=x", "unknown key; it belongs to checkpoint.load_path"),
        ("checkpoint={save_maxx: 1}", "checkpoint.save_maxx: unknown key; did you mean save_max?"),
        ("checkpoint.load_path=~", "expected text, found nothing (null)"),
        ("training.seed.x=3", "training.seed is 4, not a mapping"),
        ("training.steps", "expected section.key=value; lists are set whole, as in callbacks=[...]"),
        ("callbacks[0].type=A", "expected section.key=value; lists are set whole, as in callbacks=[...]"),
        ("=5", "expected section.key=value; lists are set whole, as in callbacks=[...]"),
        ("training..steps=5", "expected section.key=value; lists are set whole, as in callbacks=[...]"),
        ("output_dir=a #1", "everything from # on would be a comment; put the value in quotes"),
        ("output_dir=[a", "not YAML: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
        ("training.global_batch_size=3", "expected a multiple of local_batch_size (2), found 3; nearest: 2 or 4"),
    ],
)
def test_faults_quote_the_word(word: str, text: str, lines: Lines) -> None:
    assert lines("training: {seed: 4, local_batch_size: 2, global_batch_size: 2}", word) == [
        f"command line: {word}: {text}"
    ]


def test_faults_of_file_and_command_line_come_together(lines: Lines) -> None:
    found = lines("training: {steps: 0}", "training.seed=-1", "nonsense")
    assert [line.rpartition(": ")[0].split(": ")[0] for line in found] == [
        "run.yaml:1:12",
        "command line",
        "command line",
    ]


def test_bytes_that_are_not_utf8(lines: Lines) -> None:
    assert lines("training: {}", "output_dir=a\udcff") == ["command line: 'output_dir=a\\udcff': expected UTF-8"]
