"""A snapshot holds what the state was, in bounded memory that is used again, whatever happens to the state since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.engine.staging import Staging, cuts
from perdure.engine.writer import CHUNK, FileLayout, FileWrite, WriteBuffers
from perdure.storage.local import LocalStorage

sizes = st.lists(st.integers(1, 4 * CHUNK // 4096).map(lambda pages: pages * 4096), min_size=1, max_size=4)


@given(sizes, st.none() | st.integers(0, 12 * CHUNK))
def test_cuts_keep_within_the_limit_and_fill_it(files: list[int], limit: int | None) -> None:
    begins = cuts(files, limit)
    staged = sum(size - begin for size, begin in zip(files, begins, strict=True))
    assert all(0 <= begin <= size for size, begin in zip(files, begins, strict=True))
    assert all(begin % CHUNK == 0 or begin == size for size, begin in zip(files, begins, strict=True))
    if limit is None:
        assert staged == sum(files)
    else:
        assert staged <= limit
        assert staged == sum(files) or limit - staged < CHUNK


def state(scale: int) -> dict[str, Tensor]:
    return {
        "odd": torch.arange(1_000_003, dtype=torch.float32) * scale,
        "turned": torch.arange(600 * 700, dtype=torch.int32).reshape(600, 700).t() * scale,
        "half": (torch.arange(301, dtype=torch.float32) * scale).to(torch.bfloat16),
        "one": torch.tensor(float(scale)),
        "none": torch.zeros(0, 3),
    }


def file_of(tensors: dict[str, Tensor]) -> FileWrite:
    dtypes = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16"}
    shapes = [(name, dtypes[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    return FileWrite("f", FileLayout(shapes), tensors.__getitem__, {"format": "pt"})


@settings(deadline=None, max_examples=20)
@given(limit=st.none() | st.integers(0, 4 * CHUNK))
def test_a_staged_file_is_the_file_that_was(tmp_path_factory: pytest.TempPathFactory, limit: int | None) -> None:
    folder, storage, buffers = tmp_path_factory.mktemp("f"), LocalStorage(), WriteBuffers(2)
    staging = Staging(limit)
    for scale in (1, 2):
        expected = file_of(state(scale)).run(storage, str(folder / f"expected{scale}"), buffers)
        tensors = state(scale)
        file = file_of(tensors)
        staging.snapshot([file])
        if file.cut:
            file.write_live(storage, str(folder / f"staged{scale}"), buffers)
        for tensor in tensors.values():
            tensor.fill_(0)
        assert file.run(storage, str(folder / f"staged{scale}"), buffers) == expected
        assert (folder / f"staged{scale}").read_bytes() == (folder / f"expected{scale}").read_bytes()
    buffers.close()


def test_the_memory_is_used_again() -> None:
    staging, addresses = Staging(), set()
    for scale in (1, 2, 3):
        file = file_of(state(scale))
        staging.snapshot([file])
        assert staging._memory is not None
        addresses.add(staging._memory.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("size", [1, 5 << 20])
def test_memory_that_was_expected_is_what_is_used(size: int) -> None:
    staging = Staging()
    staging.expect(size)
    file = file_of(state(3))
    staging.snapshot([file])
    assert staging._memory is not None
    assert staging._memory.numel() == max(size, file.padded)


@pytest.mark.parametrize("refused", [False, True])
def test_pinned_memory_is_as_much_as_is_needed_and_given_back(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """CUDA in between: what it is asked, in order. What a copy through it gives, benchmarks/device_check.py shows."""
    held: dict[int, int] = {}
    asked: list[int] = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            asked.append(size)
            if not refused:
                held[address] = size
            return 2 * refused

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            del held[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    staging = Staging()
    for size in (3_000_000, 1_000, 5_000_001):
        assert staging._room(size, True).numel() == size
        assert list(held.values()) == ([] if refused else [max(size, 3_000_000)])
    assert asked == [3_000_000, 5_000_001]
    del staging
    assert not held


@pytest.mark.parametrize("bound", ["", "3MiB", "1B"])
def test_an_asynchronous_save_is_of_its_own_step(bound: str, tmp_path: Path) -> None:
    model = nn.Linear(1000, 1500)
    config = CheckpointConfig(save_path=str(tmp_path), async_save=True, save_max=9, staging_memory=bound)
    with Checkpointer(config, model=model, say=lambda line: None) as checkpointer:
        for step in range(1, 4):
            nn.init.constant_(model.weight, step)
            nn.init.constant_(model.bias, step)
            checkpointer.save(Progress(step, step, 1))
            nn.init.constant_(model.weight, -1)
            nn.init.constant_(model.bias, -1)
    for step in range(1, 4):
        (file,) = (tmp_path / f"iteration_{step:08d}").glob("*.safetensors")
        for tensor in load_file(file).values():
            assert torch.equal(tensor, torch.full_like(tensor, step))


@pytest.mark.parametrize("keys", [{}, {"async_save": True}, {"async_save": True, "no_load_optim": True}])
def test_a_load_is_followed_by_memory_for_the_first_snapshot(keys: dict[str, bool], tmp_path: Path) -> None:
    model = nn.Linear(1000, 1500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()
    with Checkpointer(CheckpointConfig(save_path=str(tmp_path)), model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(Progress(1, 1, 1))
    config = CheckpointConfig(save_path=str(tmp_path / "next"), load_path=str(tmp_path), **keys)
    with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as checkpointer:
        checkpointer.load()
        staging = checkpointer._runner._snapshot
        # Weights alone are not yet what a save will hold.
        assert (staging._taking is not None) == (keys == {"async_save": True})
        checkpointer.save(Progress(2, 2, 1))
        checkpointer.wait()
        if keys == {"async_save": True}:
            assert staging._memory is not None
            size = sum(path.stat().st_size for path in (tmp_path / "next" / "iteration_00000002").glob("*.safetensors"))
            # What was expected was enough, so it was not taken a second time.
            assert size <= staging._memory.numel() == checkpointer._preparer.expected_bytes()
