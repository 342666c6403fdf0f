"""Files of others in every dtype of the format: read bit for bit, refused by name where torch has no such numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.foreign.toy import load
from torch import Tensor, nn

from perdure.cli.main import run
from perdure.errors import DamagedCheckpointError

HELD_AS_THEY_ARE = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


class Holder(nn.Module):
    """Buffers of any dtype."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


def patterns(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Arbitrary bit patterns (0 and 1 where only these are numbers)."""
    size = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def test_every_dtype_that_the_library_writes_is_read_bit_for_bit(tmp_path: Path) -> None:
    tensors = {str(dtype).replace("torch.", "w_"): patterns(dtype, (3, 4)) for dtype in HELD_AS_THEY_ARE}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    model = Holder(tensors)
    load(tmp_path / "hf", model, None, tmp_path, no_load_optim=True)
    for name, want in tensors.items():
        found = model.get_buffer(name)
        assert found.dtype == want.dtype
        assert bits(found) == bits(want), name


def write(path: Path, dtype: str, shape: list[int], size: int) -> bytes:
    """A file of one tensor `w`, written by hand; gives its bytes."""
    data = bytes(i * 37 % 256 for i in range(size))
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    path.parent.mkdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return data


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "logical"),
    [
        ("F8_E8M0", [3, 2], 6, "float8_e8m0fnu"),
        ("F4", [3, 4], 6, "float4_e2m1fn_x2"),
        ("C64", [], 8, "complex64"),
        ("F8_E4M3FNUZ", [0, 2], 0, "float8_e4m3fnuz"),
    ],
)
def test_what_the_library_cannot_give_as_a_tensor_is_read_too(
    dtype: str, shape: list[int], size: int, logical: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "hf" / "model.safetensors", dtype, shape, size)
    paired = [*shape[:-1], shape[-1] // 2] if dtype == "F4" else shape
    model = Holder({"w": torch.empty(paired, dtype=getattr(torch, logical))})
    load(tmp_path / "hf", model, None, tmp_path, no_load_optim=True)
    assert bytes(bits(model.get_buffer("w"))) == data


@pytest.mark.parametrize(("dtype", "size"), [("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4), ("F128", 128)])
def test_numbers_that_torch_has_not_are_refused_by_name(dtype: str, size: int, tmp_path: Path) -> None:
    write(tmp_path / "hf" / "model.safetensors", dtype, [8] if dtype != "F4" else [7], size)
    with pytest.raises(DamagedCheckpointError, match=f"w.*{dtype}"):
        load(tmp_path / "hf", Holder({"w": torch.empty(8)}), None, tmp_path, no_load_optim=True)


def test_complex_slices_of_mindformers_are_put_together(tmp_path: Path) -> None:
    whole = patterns(torch.complex64, (4, 3))
    iteration = tmp_path / "theirs" / "iteration_00000001"
    iteration.mkdir(parents=True)
    names = [f"toy-model-{rank:07d}-0000002.safetensors" for rank in range(2)]
    for rank, name in enumerate(names):
        save_file({"w": whole[2 * rank : 2 * rank + 2].contiguous()}, iteration / name, {"format": "ms"})
    entry: dict[str, Any] = {
        "properties": {"dtype": "Complex64"},
        "global_shape": [4, 3],
        "axis_fragmentations": [2, 1],
        "chunk": [{"global_offset": [n], "local_shape": [2, 3]} for n in range(2)],
    }
    places = {f"('w', ({n},))": [{"file_name": name}] for n, name in enumerate(names)}
    table = {"state_dict_metadata": {"w": entry}, "storage_data": places}
    (iteration / "metadata.json").write_text(json.dumps(table))
    model = Holder({"w": whole})
    load(iteration, model, None, tmp_path, no_load_optim=True)
    assert bits(model.get_buffer("w")) == bits(whole)


def test_what_was_held_as_it_was_is_held_as_ours_after_an_import(tmp_path: Path) -> None:
    tensors = {"c": patterns(torch.complex64, (2, 2)), "f": patterns(torch.float8_e5m2fnuz, (2, 2))}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert run(["import", "--from", "huggingface", str(tmp_path / "hf"), str(tmp_path / "root")]) == 0
    model = Holder(tensors)
    load(tmp_path / "root", model, None, tmp_path, no_load_optim=True)
    assert all(bits(model.get_buffer(name)) == bits(tensor) for name, tensor in tensors.items())
