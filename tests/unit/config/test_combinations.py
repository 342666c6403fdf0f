"""Keys that are right by themselves and wrong together, features not built yet, and the division of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.config import not_built
from perdure.config.load import load_config_mapping
from perdure.config.ranks import RankLayout, check_ranks
from perdure.config.schema import TrainConfig
from perdure.errors import ConfigError

Load = Callable[..., TrainConfig]
Lines = Callable[..., list[str]]


@pytest.fixture
def everything_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no feature were missing, so that what follows from the others is seen."""
    monkeypatch.setattr(not_built, "FEATURES_NOT_BUILT", {})


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (
            "training: {global_batch_size: 3, local_batch_size: 4}",
            "training.global_batch_size",
            "expected a multiple of local_batch_size (4), found 3; nearest: 4",
        ),
        (
            "training: {global_batch_size: 8, rampup_batch_size: [16, 8, 100]}",
            "training.rampup_batch_size",
            "expected a start of at most global_batch_size (8), found 16",
        ),
        (
            "training: {global_batch_size: 9, rampup_batch_size: [4, 4, 100]}",
            "training.rampup_batch_size",
            "expected increments of 4 that lead from 4 to global_batch_size (9) exactly, found a rest of 1",
        ),
        (
            "training: {global_batch_size: 8, local_batch_size: 4, rampup_batch_size: [2, 2, 100]}",
            "training.rampup_batch_size",
            "expected a start and an increment that are multiples of local_batch_size (4), found 2 and 2",
        ),
        (
            "training: {ignore_data_skip: true, data_skip_steps: 3}",
            "training.data_skip_steps",
            "expected 0 together with ignore_data_skip, found 3",
        ),
        (
            "checkpoint: {auto_resume: true, no_save_optim: true}",
            "checkpoint.no_save_optim",
            "expected false together with auto_resume, found true: nothing resumes without the optimizer",
        ),
        (
            "checkpoint: {save_trainable_only: true}",
            "checkpoint.save_trainable_only",
            "expected base_load_path together with it, found an empty one",
        ),
        (
            "parallelism: {tensor_parallel: 2}",
            "parallelism.tensor_parallel",
            "expected sequence_parallel true with a degree above 1, found 2",
        ),
    ],
)
@pytest.mark.usefixtures("everything_built")
def test_combinations_that_cannot_work(text: str, key: str, words: str, lines: Lines) -> None:
    (line,) = lines(text)
    assert line.startswith("run.yaml:1:")
    assert line.endswith(f": {key}: {words}")


@pytest.mark.parametrize(
    "text",
    [
        "checkpoint: {auto_resume: true, no_load_optim: true, load_path: weights}",
        "checkpoint: {auto_resume: true, load_path: ./output/checkpoint}",
        "checkpoint: {auto_resume: true, load_path: elsewhere/iteration_00000010}",
        "checkpoint: {load_path: ./output/checkpoint/iteration_00000010}",
        "checkpoint: {auto_resume: true, enable_save: false, no_save_optim: true}",
        "checkpoint: {no_load_optim: true}",
        "checkpoint: {load_balanced: true}",
        "training: {global_batch_size: 16, local_batch_size: 4, rampup_batch_size: [4, 4, 100]}",
        "training: {eval_interleaved_steps: 3}\neval_dataset: {dataloader: {type: Text}}",
        "parallelism: {data_parallel_shard: 1, data_parallel_replicate: 1}",
    ],
)
def test_combinations_that_work(text: str, load: Load) -> None:
    load(text)


@pytest.mark.parametrize("root", ["./output/checkpoint", "output/../output/checkpoint/"])
def test_an_iteration_of_the_save_root_is_rewound_to_not_loaded(root: str, load: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.yaml:2:3: checkpoint\.load_path: expected no iteration in save_path"
    ) as caught:
        load(f"checkpoint:\n  load_path: {root}/iteration_00000012/\n  auto_resume: true")
    assert caught.value.hint == "`perdure rewind ./output/checkpoint --to 12` goes back to it"


def test_a_faulty_key_is_not_blamed_twice(lines: Lines) -> None:
    (line,) = lines("training: {local_batch_size: x, global_batch_size: 7}")
    assert "local_batch_size: expected an integer" in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "parallelism: {tensor_parallel: 2}",
            "run.yaml:1:15: parallelism.tensor_parallel: not built yet: tensor parallelism; expected 1, found 2",
        ),
        (
            "parallelism: {data_parallel_shard: 2}",
            "run.yaml:1:15: parallelism.data_parallel_shard: not built yet: sharded data; expected -1 or 1, found 2",
        ),
        (
            "monitor: {train_state: {local_loss: true}}",
            "run.yaml:1:25: monitor.train_state.local_loss: not built yet: figures; expected false, found true",
        ),
        (
            "lora_config: {target_modules: q}",
            "run.yaml:1:1: lora_config: not built yet: adapters; expected null, found a mapping",
        ),
        (
            "recompute: {mode: full}",
            "run.yaml:1:13: recompute.mode: not built yet: recomputation; expected 'None', found 'full'",
        ),
    ],
)
def test_features_not_built_are_refused_in_words(
    text: str, line: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        "parallelism.tensor_parallel": "tensor parallelism",
        "parallelism.data_parallel_shard": "sharded data",
        "monitor.train_state": "figures",
        "lora_config": "adapters",
        "recompute": "recomputation",
    }
    monkeypatch.setattr(not_built, "FEATURES_NOT_BUILT", table)
    monkeypatch.setattr(not_built, "BUILT_VALUES", {"parallelism.data_parallel_shard": (1,)})
    assert lines(text) == [line]


def test_the_table_of_missing_features_names_keys_that_are_there() -> None:
    config = load_config_mapping(
        {"lr_scheduler": {"type": "ConstantWarmUpLR"}, "eval_dataset": {"dataloader": {"type": "Text"}}}
    )
    for key in not_built.FEATURES_NOT_BUILT:
        value: object = config
        for name in key.split("."):
            assert name in type(value).model_fields, key  # type: ignore[attr-defined]
            value = getattr(value, name)


def _config(**sections: object) -> TrainConfig:
    return load_config_mapping({"lr_scheduler": {"type": "ConstantWarmUpLR"}, **sections})


def test_one_process() -> None:
    config = _config(training={"global_batch_size": 12, "local_batch_size": 4})
    assert check_ranks(config, 1) == RankLayout(
        1, replicate=1, shard=1, tensor=1, context=1, pipeline=1, micro_batches=3
    )


def test_a_batch_that_does_not_divide_names_the_nearest_sizes(load: Load) -> None:
    config = load("training:\n  global_batch_size: 64\n  local_batch_size: 4\n  rampup_batch_size: [32, 32, 1000]\n")
    assert check_ranks(config, 8).micro_batches == 2
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, 3)
    assert caught.value.message.splitlines() == [
        "run.yaml:2:3: training.global_batch_size: expected a multiple of "
        "12 (local_batch_size 4 x 3 data-parallel ranks), found 64; nearest: 60 or 72",
        "run.yaml:4:3: training.rampup_batch_size: expected a start and an increment that are multiples of "
        "12 (local_batch_size 4 x 3 data-parallel ranks), found 32 and 32",
    ]


@pytest.mark.usefixtures("everything_built")
def test_degrees_make_up_the_ranks() -> None:
    parallelism = {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "context_parallel": 1}
    config = _config(training={"global_batch_size": 8}, parallelism=parallelism)
    layout = check_ranks(config, 16)
    assert (layout.data_parallel, layout.replicate, layout.shard, layout.micro_batches) == (4, 1, 4, 2)
    with pytest.raises(ConfigError, match=r"parallelism\.tensor_parallel: expected .* to divide 6 ranks, found 4"):
        check_ranks(config, 6)
    config = _config(training={"global_batch_size": 8}, parallelism={"data_parallel_replicate": 2})
    assert (check_ranks(config, 8).replicate, check_ranks(config, 8).shard) == (2, 4)
    with pytest.raises(
        ConfigError, match=r"data_parallel_replicate: expected a divisor of the 3 data-parallel ranks, found 2"
    ):
        check_ranks(config, 3)
    config = _config(training={"global_batch_size": 8}, parallelism={"data_parallel_shard": 2})
    assert (check_ranks(config, 4).replicate, check_ranks(config, 4).shard) == (2, 2)
    written = {"data_parallel_shard": 2, "data_parallel_replicate": 1}
    config = _config(training={"global_batch_size": 8}, parallelism=written)
    with pytest.raises(ConfigError, match=r"data_parallel_shard: expected 4 or -1 for 4 ranks, found 2"):
        check_ranks(config, 4)
    config = _config(training={"global_batch_size": 8}, parallelism={"dense_fsdp_shard_size": 2})
    assert (check_ranks(config, 8).replicate, check_ranks(config, 8).shard) == (4, 2)
    config = _config(training={"global_batch_size": 6}, parallelism={"dense_fsdp_shard_size": 4})
    with pytest.raises(ConfigError, match=r"dense_fsdp_shard_size: expected a divisor of the 6 ranks .* found 4"):
        check_ranks(config, 6)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_a_size_is_refused_exactly_when_it_does_not_divide(micro: int, ranks: int, factor: int) -> None:
    config = _config(training={"global_batch_size": micro * ranks * factor, "local_batch_size": micro})
    assert check_ranks(config, ranks).micro_batches == factor
    if ranks > 1:
        with pytest.raises(ConfigError, match="expected a multiple"):
            check_ranks(
                _config(training={"global_batch_size": micro * (ranks * factor + 1), "local_batch_size": micro}), ranks
            )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "parallelism: {pipeline_parallel_interleave_num: 2}",
            "run.yaml:1:15: parallelism.pipeline_parallel_interleave_num: expected 1 without pipeline_parallel, "
            "found 2",
        ),
        (
            "parallelism:\n  pipeline_parallel: 2\n  pipeline_parallel_interleave_num: 2\n"
            "  pipeline_parallel_schedule: gpipe",
            "run.yaml:4:3: parallelism.pipeline_parallel_schedule: expected 1f1b or interleaved_1f1b with 2 chunks "
            "per rank, found 'gpipe'",
        ),
        (
            "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: [0-1]}",
            "run.yaml:1:37: parallelism.pipeline_parallel_layers_per_stage: expected 'auto' or a list with one item "
            "for each of 2 pipeline ranks, found ['0-1']",
        ),
        (
            "parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: [0-1, 3]}",
            "run.yaml:1:37: parallelism.pipeline_parallel_layers_per_stage: expected stage 1 to begin with layer 2, "
            "found layer 3",
        ),
        ("recompute: {mode: full}", "run.yaml:1:1: recompute.full_recompute_layer: missing; mode full requires it"),
        (
            "recompute: {mode: select, select_module: {mlp: 0-3}}",
            "run.yaml:1:27: recompute.select_module: expected a list of ranges of layers such as ['0-3'], found the "
            "text '0-3'",
        ),
        (
            "parallelism: {data_parallel_shard_strategy: optim}",
            "run.yaml:1:15: parallelism.data_parallel_shard_strategy: not built yet: sharding the optimizer state "
            "alone; expected 'optim_grads_params' or 'optim_grads', found 'optim'",
        ),
        (
            "parallelism: {context_parallel: 2}",
            "run.yaml:1:15: parallelism.context_parallel: not built yet: context parallelism; expected 1, found 2",
        ),
    ],
)
def test_layouts_that_cannot_be_meant(text: str, line: str, lines: Lines) -> None:
    assert lines(text) == [line]


@pytest.mark.parametrize(
    ("training", "parallelism", "words"),
    [
        ({"global_batch_size": 2}, {}, r"global_batch_size: expected at least 4 micro-batches .* found 2; raise it"),
        ({"global_batch_size": 8, "rampup_batch_size": [2, 2, 8]}, {}, "expected at least 4 micro-batches .* found 2"),
        ({"global_batch_size": 9}, {"pipeline_parallel_interleave_num": 2}, "divide into 2 rounds .* found 9"),
        ({"global_batch_size": 8}, {"pipeline_parallel_microbatch_size": 4}, r"microbatch_size: expected 1 or .* = 8"),
        ({"global_batch_size": 8}, {"cpu_offload": True}, "cpu_offload: expected false where nothing is sharded"),
    ],
)
def test_micro_batches_that_a_schedule_cannot_run(
    training: dict[str, object], parallelism: dict[str, object], words: str
) -> None:
    config = _config(training=training, parallelism={"pipeline_parallel": 4, **parallelism})
    with pytest.raises(ConfigError, match=words):
        check_ranks(config, 4)


@pytest.mark.parametrize(
    ("training", "parallelism"),
    [
        ({"global_batch_size": 2}, {"pipeline_parallel_schedule": "gpipe"}),
        ({"global_batch_size": 4, "rampup_batch_size": [4, 4, 8]}, {"pipeline_parallel_microbatch_size": 4}),
        ({"global_batch_size": 12}, {"pipeline_parallel_interleave_num": 2}),
        ({"global_batch_size": 3}, {"pipeline_parallel_schedule": "interleaved_1f1b"}),
    ],
)
def test_micro_batches_that_a_schedule_can_run(training: dict[str, object], parallelism: dict[str, object]) -> None:
    config = _config(training=training, parallelism={"pipeline_parallel": 4, **parallelism})
    assert check_ranks(config, 4).pipeline == 4
