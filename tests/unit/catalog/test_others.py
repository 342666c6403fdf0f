"""What other programs left at a path is told with the way here."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.catalog.choose import locate
from perdure.errors import CheckpointNotFoundError


@pytest.mark.parametrize(
    ("names", "hint"),
    [
        ([".metadata", "__0_0.distcp"], "perdure import --from torch-dcp {path} ROOT"),
        (["pytorch_model.bin", "config.json"], "perdure import --from torch {path}/pytorch_model.bin ROOT"),
        (["last.ckpt"], "perdure import --from torch {path}/last.ckpt ROOT"),
        (["latest", "global_step9/", "global_step10/"], "name one of its checkpoints: {path}/global_step10"),
        (["checkpoint-500/", "checkpoint-1000/", "runs/"], "name one of its checkpoints: {path}/checkpoint-1000"),
        (["latest_checkpointed_iteration.txt", "iter_0000005/"], "name one of its checkpoints: {path}/iter_0000005"),
        (["notes.txt", "checkpoint-old/"], None),
    ],
)
def test_a_directory_of_another_program(tmp_path: Path, names: list[str], hint: str | None) -> None:
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(CheckpointNotFoundError) as caught:
        locate(tmp_path)
    assert (hint is None) == (caught.value.hint is None)
    assert hint is None or hint.format(path=tmp_path) in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("weights.pth", "perdure import --from torch {path}/weights.pth ROOT"),
        ("model.safetensors", "the directory that it is a part of: {path}"),
        ("model-00001-of-00002.safetensors", "the directory that it is a part of: {path}"),
        ("mine.safetensors", "call it model.safetensors"),
    ],
)
def test_a_file_of_another_program(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointNotFoundError) as caught:
        locate(tmp_path / name)
    assert hint.format(path=tmp_path) in str(caught.value.hint)
