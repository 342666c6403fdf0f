"""Processes that a launcher has started, but that know nothing of each other, are no ranks and are told so."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from perdure import CheckpointConfig, Checkpointer, Trainer
from perdure.engine.launcher import check_joined, launched_ranks
from perdure.engine.ranks import neighbours
from perdure.errors import UsageError

SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *SLURM)
JOINABLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def told(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "srun has started 2 processes"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, "srun has started 4 processes (SLURM_NTASKS=4, SLURM_PROCID=2)"),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            "mpirun (Open MPI) has started 2 processes (OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=0)",
        ),
        ({"PMI_SIZE": "8", "PMI_RANK": "7"}, "mpirun has started 8 processes"),
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_launcher_that_joins_nobody_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    told(monkeypatch, environment)
    with pytest.raises(UsageError) as caught:
        launched_ranks()
    assert words in caught.value.message
    assert "WORLD_SIZE=1" in str(caught.value.hint)
    told(monkeypatch, {**environment, "WORLD_SIZE": "1"})
    assert launched_ranks() == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8"},  # a shell within an allocation
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "WORLD_SIZE": "1", "RANK": "0"},
    ],
    ids=str,
)
def test_one_process_is_one_rank(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    told(monkeypatch, environment)
    assert launched_ranks() == 1
    check_joined(1)


def test_ranks_that_have_not_joined_do_not_train_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, JOINABLE)
    assert launched_ranks() == 2
    config = {"lr_scheduler": {"type": "ConstantWarmUpLR"}, "output_dir": str(tmp_path / "out")}
    with pytest.raises(UsageError, match=r"rank 1 of 2 .* torch\.distributed is not initialised"):
        Trainer(config, model=nn.Linear(1, 1), train_dataset=[1]).train()
    with pytest.raises(UsageError, match="init_process_group"):
        Checkpointer(CheckpointConfig(save_path=str(tmp_path / "out")), model=nn.Linear(1, 1))
    assert not (tmp_path / "out").exists()
    told(monkeypatch, {"WORLD_SIZE": "2"})
    check_joined(2)  # however they have joined


@pytest.mark.parametrize("text", ["", "two", "0", "-2", "2.0"])
def test_a_number_of_ranks_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    told(monkeypatch, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": text})
    with pytest.raises(UsageError, match="the environment variable LOCAL_WORLD_SIZE: expected a number from 1 on"):
        neighbours(0, 2)
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE"):
        Checkpointer(CheckpointConfig(save_path=str(tmp_path)), model=nn.Linear(1, 1))
