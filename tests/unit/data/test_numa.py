"""Workers run on the processors of their rank's memory node, where there are several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from perdure.data.loader import ResumableLoader
from perdure.data.numa import worker_cpus


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three nodes: processors 0 to 3 and 8, 4 to 7, and memory alone."""
    for number, cpus in enumerate(("0-3,8\n", "4-7\n", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    (tmp_path / "has_cpu").write_text("0-1\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.mark.parametrize(
    ("rank", "ranks", "cpus"),
    [
        (0, 1, {0, 1, 2, 3, 8}),
        (0, 2, {0, 1, 2, 3, 8}),
        (1, 2, {4, 5, 6, 7}),
        (1, 4, {0, 1, 2, 3, 8}),
        (2, 3, {4, 5, 6, 7}),
    ],
)
def test_ranks_are_spread_over_the_nodes(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, cpus: set[int]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert worker_cpus(nodes) == cpus


@pytest.mark.parametrize(("rank", "ranks"), [("2", "2"), ("", "2"), ("one", "2"), ("0", "0"), ("-1", "2")])
def test_a_rank_that_cannot_be_is_bound_to_no_node(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, rank: str, ranks: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert worker_cpus(nodes) is None


def test_processors_that_are_not_ours_do_not_count(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 4})
    assert worker_cpus(nodes) == {2, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 6})
    assert worker_cpus(nodes) is None
    assert worker_cpus(nodes / "none") is None


def test_the_node_of_the_device_goes_first(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    device = nodes / "pci" / "0000:3b:00.0"
    assert worker_cpus(nodes, nodes / "pci") == {0, 1, 2, 3, 8}
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert worker_cpus(nodes, nodes / "pci") == {4, 5, 6, 7}
    (device / "numa_node").write_text("-1\n")
    assert worker_cpus(nodes, nodes / "pci") == {0, 1, 2, 3, 8}


class Affinity:
    """Samples that say where they are read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return sorted(os.sched_getaffinity(0))


def test_workers_are_bound_and_the_run_itself_is_not() -> None:
    before = os.sched_getaffinity(0)
    with ResumableLoader(
        Affinity(), global_batch_size=1, num_workers=1, collate_fn=lambda samples: samples[0]
    ) as loader:
        loader.worker_cpus = frozenset({max(before)})
        assert next(loader.take()).micro_batches[0].data == [max(before)]
    assert os.sched_getaffinity(0) == before
