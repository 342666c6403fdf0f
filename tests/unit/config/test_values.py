"""Kinds and ranges of values: nothing is converted, and a refusal says what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.config.schema import (
    CheckpointConfig,
    DataloaderConfig,
    DatasetConfig,
    LRSchedulerConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingConfig,
)
from perdure.errors import ConfigError, UsageError

Load = Callable[..., TrainConfig]
Lines = Callable[..., list[str]]


@pytest.mark.parametrize("value", ["'False'", "'true'", "0", "1", "no", "yes", "null", "1.0", "[]"])
def test_only_true_and_false_are_booleans(value: str, lines: Lines) -> None:
    (line,) = lines(f"checkpoint:\n  no_load_optim: {value}")
    assert line.startswith("run.yaml:2:3: checkpoint.no_load_optim: expected true or false, found ")


def test_the_text_false_gets_a_word_about_its_quotes(lines: Lines) -> None:
    (line,) = lines("checkpoint: {no_load_optim: 'False'}")
    assert line.endswith("expected true or false, found the text 'False'; write false without quotes")


@pytest.mark.parametrize(("value", "meant"), [("on", "true"), ("Yes", "true"), ("off", "false"), ("NO", "false")])
def test_what_older_yaml_took_for_a_boolean_is_told_what_to_write(value: str, meant: str, lines: Lines) -> None:
    (line,) = lines(f"checkpoint: {{auto_resume: {value}}}")
    assert line.endswith(f"expected true or false, found the text '{value}'; write {meant}")


@pytest.mark.parametrize(("value", "expected"), [("10", 10), ("1e1", 10), ("10.0", 10), ("0xa", 10)])
def test_integers_may_be_written_as_whole_numbers(value: str, expected: int, load: Load) -> None:
    steps = load(f"checkpoint: {{save_interleaved_steps: {value}}}").checkpoint.save_interleaved_steps
    assert steps == expected
    assert type(steps) is int


@pytest.mark.parametrize("value", ["'10'", "2.5", "true", "null", "ten", "[10]", ".inf", ".nan", "1e300"])
def test_what_is_not_a_whole_number_is_no_integer(value: str, lines: Lines) -> None:
    (line,) = lines(f"checkpoint: {{save_interleaved_steps: {value}}}")
    assert line.startswith("run.yaml:1:14: checkpoint.save_interleaved_steps: expected a")


@pytest.mark.parametrize("value", ["0", "-1", "'5'", "2.5", "null"])
def test_a_limit_of_kept_checkpoints_is_at_least_one(value: str, lines: Lines) -> None:
    (line,) = lines(f"checkpoint: {{save_max: {value}}}")
    assert line.startswith("run.yaml:1:14: checkpoint.save_max: expected ")


@pytest.mark.parametrize("value", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_rates_may_be_written_as_numbers_are(value: str, load: Load) -> None:
    text = f"lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: {value}}}"
    assert load(text, complete=True).lr_scheduler.learning_rate == 1e-4


@pytest.mark.parametrize("value", ["'1e-4'", "1e-4x", "-1", ".nan", ".inf", "true"])
def test_other_rates_are_refused_at_the_start(value: str, lines: Lines) -> None:
    (line,) = lines(f"lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: {value}}}", complete=True)
    assert line.startswith("run.yaml:1:40: lr_scheduler.learning_rate: expected a")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("training", "steps: 0"),
        ("training", "seed: -1"),
        ("training", "seed: 9223372036854775808"),
        ("training", "max_norm: 0"),
        ("training", "rampup_batch_size: [1, 1]"),
        ("training", "skip_ranges: [[3, 3]]"),
        ("training", "skip_ranges: [[0, 3], [2, 5]]"),
        ("training", "skip_ranges: [[0, x]]"),
        ("optimizer", "betas: [0.9, 1.0]"),
        ("optimizer", "betas: [0.9]"),
        ("optimizer", "betas: [0.9, 0.9, 0.9]"),
        ("optimizer", "eps: -1e-8"),
        ("optimizer", "type: 'Adam W'"),
        ("optimizer", "weight_decay_include: [1]"),
        ("parallelism", "data_parallel_shard: 0"),
        ("parallelism", "data_parallel_shard: -2"),
        ("checkpoint", "prefix: a/b"),
        ("checkpoint", "prefix: ''"),
        ("checkpoint", 'prefix: "a\\0b"'),
        ("checkpoint", 'prefix: "a\\nb"'),
        ("checkpoint", f"prefix: {'a' * 101}"),
        ("checkpoint", f"prefix: {'漢' * 80}"),
        ("checkpoint", "prefix: 7"),
        ("checkpoint", "on_corrupt: ignore"),
        ("checkpoint", "staging_memory: 8GX"),
        ("checkpoint", "staging_memory: 0GiB"),
        ("checkpoint", "save_path: 3"),
        ("checkpoint", "save_path: null"),
        ("checkpoint", 'save_path: "a\\0b"'),
        ("checkpoint", "save_path: s3://bucket/run"),
        ("checkpoint", "load_path: ~no-such-user-as-this/x"),
        ("train_dataset", "num_parallel_workers: -1"),
        ("train_dataset", "prefetch_size: 0"),
    ],
)
def test_values_out_of_range(section: str, text: str, lines: Lines) -> None:
    key = text.partition(":")[0]
    found = lines(f"{section}:\n  {text}")
    assert all(line.startswith("run.yaml:2:") for line in found)
    assert all(f" {section}.{key}" in line and "expected" in line and "found" in line for line in found)


def test_defaults_are_those_of_the_reference(load: Load) -> None:
    config = load("")
    assert config.checkpoint == CheckpointConfig()
    checkpoint = config.checkpoint
    assert (checkpoint.enable_save, checkpoint.save_path, checkpoint.save_interleaved_steps) == (True, "", 1000)
    assert (checkpoint.no_save_optim, checkpoint.save_max, checkpoint.load_path) == (False, 5, "")
    assert (checkpoint.no_load_optim, checkpoint.load_balanced, checkpoint.prefix) == (False, False, "checkpoint")
    assert (config.training.seed, config.optimizer.betas, config.output_dir) == (42, [0.9, 0.95], "./output")
    assert config.eval_dataset is None
    assert config.train_dataset.num_parallel_workers == 8


def test_null_is_the_default_prefix_and_no_recomputation(load: Load) -> None:
    config = load("checkpoint: {prefix: null}\nrecompute: {mode: null}")
    assert config.checkpoint.prefix == "checkpoint"
    assert config.recompute.mode == "None"


def test_sections_may_be_left_empty(load: Load) -> None:
    assert load("training:\nmonitor:\n  tensorboard:\ncallbacks:\neval_dataset:\n") == load("")


def test_home_is_expanded_in_paths_and_other_forms_are_kept(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/me")
    config = load(
        "checkpoint: {save_path: ~/ck, load_path: './~/a b/../ü/'}\ntrain_dataset: {dataloader: {path: ~/t.bin}}"
    )
    assert config.checkpoint.save_path == "/somewhere/me/ck"
    assert config.checkpoint.load_path == "./~/a b/../ü/"
    assert config.train_dataset.dataloader.extras()["path"] == "/somewhere/me/t.bin"
    assert CheckpointConfig(save_path="~").save_path == "/somewhere/me"


def test_a_path_object_is_a_path() -> None:
    assert CheckpointConfig(save_path=Path("a") / "b").save_path == "a/b"


def test_the_save_root_falls_back_to_the_run_directory(load: Load) -> None:
    assert load("").save_path == "./output/checkpoint"
    assert load("output_dir: runs/a").save_path == "runs/a/checkpoint"
    assert load("checkpoint: {save_path: ck}").save_path == "ck"


def test_sizes_in_bytes() -> None:
    assert CheckpointConfig(staging_memory="8GiB").staging_bytes == 8 << 30
    assert CheckpointConfig(staging_memory="1.5 KB").staging_bytes == 1500
    assert CheckpointConfig().staging_bytes is None


def test_further_keys_are_kept_and_given_back() -> None:
    section = ModelConfig(type="decoder", hidden_size=8, rope={"theta": 1e4}, extras=1, model_dump=2)
    assert section.extras.__func__ is ModelConfig.extras
    assert section.extras() == {"hidden_size": 8, "rope": {"theta": 1e4}, "extras": 1, "model_dump": 2}
    assert section.model_fields_set >= {"type", "hidden_size"}
    assert DataloaderConfig(type="pkg.mod:Thing", x=1).extras() == {"x": 1}
    assert CheckpointConfig().extras() == {}


def test_the_reference_names_of_a_model_are_accepted(load: Load) -> None:
    model = load("model: {model_type: qwen3, architectures: Qwen3ForCausalLM, num_layers: 2}").model
    assert (model.model_type, model.architectures, model.extras()) == ("qwen3", ["Qwen3ForCausalLM"], {"num_layers": 2})


def test_sections_by_keyword_are_checked_like_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(save_interleave_steps=5, save_max="5", no_load_optim="False")
    assert isinstance(caught.value, UsageError | ValueError)
    assert sorted(line.partition(":")[0] for line in caught.value.message.splitlines()) == [
        "no_load_optim",
        "save_interleave_steps",
        "save_max",
    ]
    assert "did you mean save_interleaved_steps?" in caught.value.message


def test_nested_sections_by_keyword() -> None:
    assert DatasetConfig(dataloader={"type": "Text", "path": "x"}).dataloader.type == "Text"
    assert MonitorConfig(tensorboard=None) == MonitorConfig()
    with pytest.raises(ConfigError, match=r"^health_checkpoint\.on_spike: expected one of mark, skip, rollback, found"):
        MonitorConfig(health_checkpoint={"on_spike": "x"})
    with pytest.raises(ConfigError, match=r"^tensorboard: expected a mapping, found \[1\]"):
        MonitorConfig(tensorboard=[1])


def test_a_whole_configuration_by_keyword() -> None:
    config = TrainConfig(lr_scheduler=LRSchedulerConfig(type="ConstantWarmUpLR"), training={"steps": 3})
    assert config.training == TrainingConfig(steps=3)
    assert config.optimizer == OptimizerConfig()
    with pytest.raises(ConfigError, match=r"^lr_scheduler\.type: missing$"):
        TrainConfig()


def test_sections_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        CheckpointConfig().save_max = 3
