"""Weights into a directory that `from_pretrained` opens: safetensors files of a limited size, index, config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from perdure.convert.state import Item, State, staged
from perdure.engine.writer import WriteBuffers, write_tensors
from perdure.errors import MismatchError
from perdure.format.dtypes import BY_SAFETENSORS, BY_TORCH
from perdure.storage.local import LocalStorage

__all__ = ["LARGEST", "llama_config", "transformers_config", "write_huggingface"]

LARGEST = 5_000_000_000
"""Bytes of tensors per file, as the library's own limit is."""

_FLOATS = ("F64", "F32", "F16", "BF16")


def write_huggingface(
    state: State,
    target: str,
    *,
    dtype: str = "",
    largest: int = LARGEST,
    config: Mapping[str, Any] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Writes the model's weights; gives the names of the files. Tied weights are written once.

    Args:
        target: a directory that doesn't exist yet, or is empty.
        dtype: convert floating-point weights to this torch dtype; "": as they are.
        largest: bytes of tensors in one file.
        config: what config.json is to say; None: no such file.

    Raises:
        MismatchError: a weight that the format cannot hold.
        UsageError: the target is there already.
    """
    items = state.section("model")
    for item in items:
        if item.logical:
            raise MismatchError(f"{state.where}: {item.name} is of dtype {item.logical}, which the format cannot hold")
    files = _cut(items, dtype, largest)
    storage, written = LocalStorage(), []
    with staged(target) as directory:
        os.mkdir(directory)
        buffers = WriteBuffers()
        try:
            places: dict[str, str] = {}
            for number, members in enumerate(files, start=1):
                name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
                by_name = {item.name: item for item in members}
                write_tensors(
                    storage,
                    os.path.join(directory, name),
                    name,
                    [(item.name, _stored(item, dtype), item.shape) for item in members],
                    lambda key, held=by_name: _converted(held[key], dtype, advance),  # type: ignore[misc]
                    {"format": "pt"},
                    buffers,
                )
                places.update({item.name: name for item in members})
                written.append(name)
        finally:
            buffers.close()
        if len(files) > 1:
            size = sum(_size(item, dtype) for item in items)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
            written.append(_write_json(directory, "model.safetensors.index.json", index))
        if config is not None:
            said = dtype or _torch_name(items)
            written.append(_write_json(directory, "config.json", {**config, "torch_dtype": said}))
        storage.sync_directory(directory)
    return written


def llama_config(model: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What config.json says of our decoder, which computes as a Llama does.

    Args:
        model: the run's `model` section.
        shapes: of the weights, under Hugging Face's names.
    """
    vocabulary, hidden = shapes["model.embed_tokens.weight"]
    heads = int(model.get("num_attention_heads") or 4)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": len([name for name in shapes if name.endswith(".input_layernorm.weight")]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(model.get("num_key_value_heads") or heads),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(model.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(model.get("rms_norm_eps") or 1e-6),
        "rope_theta": float(model.get("rope_theta") or 10000.0),
        "tie_word_embeddings": bool(model.get("tie_word_embeddings")),
        "bos_token_id": None,
        "eos_token_id": None,
    }


def transformers_config(model: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What config.json says of a model that the transformers library built.

    Args:
        model: the run's `model` section.
        shapes: of the weights; they say how many token ids there are where the section doesn't.

    Raises:
        UsageError: the library is not installed.
        KeyFaults: the library refuses the section.
    """
    from perdure.models.transformers import causal_lm

    keys = {key: value for key, value in model.items() if key not in ("type", "compute_dtype")}
    with torch.device("meta"):
        built: Any = causal_lm(**keys)
    embedding = built.get_input_embeddings().weight
    name = next(name for name, parameter in built.named_parameters() if parameter is embedding)
    said: dict[str, Any] = built.config.to_dict()
    said.pop("dtype", None)
    vocabulary = shapes[name][0] if name in shapes else built.config.vocab_size
    return {**said, "architectures": [type(built).__name__], "vocab_size": vocabulary, "use_cache": True}


def _cut(items: list[Item], dtype: str, largest: int) -> list[list[Item]]:
    """Tensors in order into files, each of at most `largest` bytes or of one tensor."""
    files: list[list[Item]] = [[]]
    room = largest
    for item in items:
        size = _size(item, dtype)
        if files[-1] and size > room:
            files.append([])
            room = largest
        files[-1].append(item)
        room -= size
    return files


def _stored(item: Item, dtype: str) -> str:
    return BY_TORCH[dtype].stored if dtype and item.dtype in _FLOATS else item.dtype


def _size(item: Item, dtype: str) -> int:
    return item.nbytes // BY_SAFETENSORS[item.dtype].itemsize * BY_SAFETENSORS[_stored(item, dtype)].itemsize


def _converted(item: Item, dtype: str, advance: Callable[[int], None]) -> Tensor:
    tensor = item.load()
    advance(item.nbytes)
    return tensor.to(getattr(torch, BY_SAFETENSORS[_stored(item, dtype)].torch))


def _torch_name(items: list[Item]) -> str:
    """The dtype of most bytes."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.dtype] = sizes.get(item.dtype, 0) + item.nbytes
    return BY_SAFETENSORS[max(sizes, key=lambda name: sizes[name])].torch if sizes else "float32"


def _write_json(directory: str, name: str, value: object) -> str:
    LocalStorage().write(os.path.join(directory, name), (json.dumps(value, indent=2) + "\n").encode())
    return name
