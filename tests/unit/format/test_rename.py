"""Names changed on the record: rules in order, fused tensors split and joined, nothing silently lost."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.errors import MismatchError
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord, TensorRecord
from perdure.format.rename import READY, parse_rules, rename


def record(**shapes: tuple[int, ...]) -> CheckpointMetadata:
    metadata = CheckpointMetadata(files=[FileRecord("a.safetensors", 0, "")])
    for key, shape in shapes.items():
        metadata.model[key.replace("__", ".")] = TensorRecord(
            "F32", shape, [ShardRecord(0, (0,) * len(shape), shape, "")]
        )
    return metadata


def names(rules: list[Any], *given: str) -> list[str]:
    metadata = record(**{name.replace(".", "__"): (2,) for name in given})
    return list(rename(metadata, parse_rules(rules), "here").metadata.model)


def test_rules_apply_in_order_each_to_what_the_last_one_left() -> None:
    assert names([["^a", "b"], ["^b", "c"]], "a.x", "b.x.y") == ["c.x", "c.x.y"]


def test_an_optimizer_tensor_keeps_its_state_in_front() -> None:
    metadata = record(w=(2,))
    for name in ("adam_m.w", "adam_v.w", "main_param.w"):
        metadata.optimizer[name] = metadata.model["w"]
    metadata.optimizer["adam_step"] = metadata.model["w"]
    metadata.training = {"optimizer": {"type": "AdamW", "groups": [{"params": ["w"], "settings": {}}]}}
    after = rename(metadata, parse_rules([["^", "model."], ["adam", "eve"]]), "here").metadata
    assert list(after.optimizer) == ["adam_m.model.w", "adam_v.model.w", "main_param.model.w", "adam_step"]
    assert after.training["optimizer"]["groups"] == [{"params": ["model.w"], "settings": {}}]
    assert metadata.training["optimizer"]["groups"] == [{"params": ["w"], "settings": {}}]


THEIRS = [
    "embedding.word_embeddings.weight",
    "decoder.layers.3.input_layernorm.weight",
    "decoder.layers.3.self_attention.linear_q.weight",
    "decoder.layers.3.self_attention.linear_k.bias",
    "decoder.layers.3.self_attention.linear_v.weight",
    "decoder.layers.3.self_attention.linear_proj.weight",
    "decoder.layers.3.self_attention.q_layernorm.weight",
    "decoder.layers.3.pre_mlp_layernorm.weight",
    "decoder.layers.3.mlp.gating.weight",
    "decoder.layers.3.mlp.hidden.weight",
    "decoder.layers.3.mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
]
HUGGINGFACE = [
    "model.embed_tokens.weight",
    "model.layers.3.input_layernorm.weight",
    "model.layers.3.self_attn.q_proj.weight",
    "model.layers.3.self_attn.k_proj.bias",
    "model.layers.3.self_attn.v_proj.weight",
    "model.layers.3.self_attn.o_proj.weight",
    "model.layers.3.self_attn.q_norm.weight",
    "model.layers.3.post_attention_layernorm.weight",
    "model.layers.3.mlp.gate_proj.weight",
    "model.layers.3.mlp.up_proj.weight",
    "model.layers.3.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]
OURS = [name.removeprefix("model.") for name in HUGGINGFACE]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("mindformers-to-huggingface", THEIRS, HUGGINGFACE),
        ("huggingface-to-mindformers", HUGGINGFACE, THEIRS),
        ("mindformers-to-decoder", THEIRS, OURS),
        ("huggingface-to-decoder", HUGGINGFACE, OURS),
        ("decoder-to-huggingface", OURS, HUGGINGFACE),
    ],
)
def test_the_ready_maps(name: str, before: list[str], after: list[str]) -> None:
    assert names([name], *before) == after
    assert name in READY


def test_a_fused_tensor_is_split_by_groups_of_rows() -> None:
    """Two groups of two query heads, one key and one value head; cut over two files in the middle of a group."""
    metadata = record()
    metadata.files.append(FileRecord("b.safetensors", 0, ""))
    shards = [ShardRecord(0, (0, 0), (3, 5), ""), ShardRecord(1, (3, 0), (5, 5), "")]
    metadata.model["x.qkv"] = TensorRecord("F32", (8, 5), shards)
    rule = {"split": r"(.*)\.qkv", "into": [r"\1.q", r"\1.k", r"\1.v"], "rows": [2, 1, 1]}
    renamed = rename(metadata, parse_rules([rule]), "here")
    rows: dict[str, list[int]] = {}
    for name, tensor in renamed.metadata.model.items():
        rows[name] = [-1] * tensor.shape[0]
        for shard in tensor.shards:
            view = renamed.views["model", name][shard]
            for row in range(shard.shape[0]):
                rows[name][shard.offset[0] + row] = view.shard.offset[0] + view.skip + row
    assert rows == {"x.q": [0, 1, 4, 5], "x.k": [2, 6], "x.v": [3, 7]}
    back = {"join": [r"(.*)\.q", r"(.*)\.k", r"(.*)\.v"], "into": r"\1.qkv", "rows": [2, 1, 1]}
    again = rename(metadata, parse_rules([rule, back]), "here")
    (tensor,) = again.metadata.model.values()
    assert tensor.shape == (8, 5)
    for shard in tensor.shards:
        view = again.views["model", "x.qkv"][shard]
        assert view.shard.offset[0] + view.skip == shard.offset[0]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([[".*", "same"]], "another tensor has"),
        ([{"split": "w", "into": ["a", "b"], "rows": [2, 3]}], "not a multiple of 5"),
        ([{"join": ["w", "none"], "into": "x", "rows": [2, 2]}], "to be joined of 2"),
        ([{"join": ["w", "v"], "into": "x", "rows": [2, 2]}], "do not fit together"),
    ],
)
def test_what_cannot_be_done_to_a_checkpoint_is_told(rules: list[Any], said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        rename(record(w=(4, 3), v=(2, 3)), parse_rules(rules), "here")


@pytest.mark.parametrize(
    "rules",
    [
        ["no-such-map"],
        [["("]],
        [["(", "x"]],
        [["a", r"\1"]],
        [["a", r"\g<n>"]],
        [["a", "b", "c"]],
        [7],
        [{"split": "a", "into": ["b"], "rows": [1]}],
        [{"split": "a", "into": ["b", "c"], "rows": [1, 0]}],
        [{"split": "a", "into": ["b", "c"], "rows": [1, 1, 1]}],
        [{"split": "a", "into": ["b", r"\1"], "rows": [1, 1]}],
        [{"split": "a", "into": "bc", "rows": [1, 1]}],
        [{"join": "ab", "into": "c", "rows": [1, 1]}],
        [{"split": "a"}],
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_by_its_number(rules: list[Any]) -> None:
    with pytest.raises(ValueError, match="rule 2: "):
        parse_rules([["fine", "too"], *rules])
