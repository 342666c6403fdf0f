"""A model against the config.json that lies beside published weights: what is the same in shape may still differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from perdure.models.decoder import Decoder

__all__ = ["config_differences"]

# Of these, what is computed with given weights does not depend; dropout is a choice of each training.
_INDIFFERENT = {
    "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "gradient_checkpointing", "id2label",
    "initializer_range", "keys_to_ignore_at_inference", "label2id", "max_position_embeddings", "name_or_path",
    "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache", "use_return_dict",
}  # fmt: skip
_ROPE = ("rope_parameters", "rope_scaling")


def config_differences(model: nn.Module, config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in config.json, value of the model) for all that changes what the model computes.

    Models of the transformers library and the reference decoder can be compared; of others nothing is known.
    """
    if isinstance(model, Decoder):
        return _against(_said(config), _decoder(model))
    own = getattr(model, "config", None)
    if own is None or not callable(getattr(own, "to_dict", None)):
        return []
    kind = config.get("model_type")
    if kind != own.model_type:
        return [("model_type", kind, own.model_type)]
    # Their class knows the spellings of older versions, and what a file leaves out.
    theirs = type(own).from_dict({key: value for key, value in config.items() if key != "model_type"})
    return _against(_telling(theirs.to_dict()), _telling(own.to_dict()))


def _against(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, theirs[key], ours[key]) for key in ours if key in theirs and theirs[key] != ours[key]]


def _telling(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if key not in _INDIFFERENT
        and not key.startswith("_")
        and not key.endswith(("_token_id", "dropout", "_pdrop", "_prob"))
    }


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    """A llama's config.json in the decoder's words; what a file leaves out is the library's default."""
    rope = next((value for key in _ROPE if isinstance(value := config.get(key), Mapping)), {})
    heads = config.get("num_attention_heads")
    said = {
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **{key: value for key, value in config.items() if key not in ("rope_theta", *_ROPE) and value is not None},
    }
    return said | {"rope_theta": float(said["rope_theta"])}


def _decoder(model: Decoder) -> dict[str, Any]:
    first: Any = next(iter(model.layers.values()))
    attention = first.self_attn
    return {
        "hidden_size": attention.q_proj.in_features,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": attention.q_proj.out_features // attention.head_dim,
        "num_key_value_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": model.head_dim,
        "rms_norm_eps": first.input_layernorm.eps,
        "rope_theta": model.rope_theta,
        "rope_type": "default",
        "hidden_act": "silu",
        "tie_word_embeddings": model.tie_word_embeddings,
    }
