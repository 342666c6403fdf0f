"""The processors that a rank's workers belong on, where a machine has several memory nodes.

Linux gives a process memory from the node of the processor that it runs on, so binding to processors suffices.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["worker_cpus"]

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_RANK_HERE = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def worker_cpus(nodes: Path = _NODES, pci_devices: Path = _PCI_DEVICES) -> frozenset[int] | None:
    """The processors of this rank's memory node; None where there is but one node, or nobody tells which is the rank's.

    It is the node of the rank's CUDA device, or else this machine's ranks are spread over its nodes. Processors
    that the process may not use, and nodes without any, do not count.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    usable = {number: cpus & allowed for number, cpus in _cpus_of_nodes(nodes).items() if cpus & allowed}
    if len(usable) < 2:
        return None
    near = _node_of_device(pci_devices)
    if near not in usable:
        told = [os.environ.get(name, default) for name, default in _RANK_HERE]
        rank, ranks = (int(text) if text.isdecimal() else -1 for text in told)
        if not 0 <= rank < ranks:
            return None
        near = sorted(usable)[rank * len(usable) // ranks]
    return frozenset(usable[near])


def _cpus_of_nodes(nodes: Path) -> dict[int, set[int]]:
    found = {}
    for directory in nodes.glob("node[0-9]*"):
        try:
            listed = (directory / "cpulist").read_text()
        except OSError:
            continue
        found[int(directory.name.removeprefix("node"))] = {
            cpu for part in listed.strip().split(",") if part for cpu in _range(part)
        }
    return found


def _range(text: str) -> range:
    """`4-7` or `4`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _node_of_device(pci_devices: Path) -> int | None:
    """The node of the present CUDA device; None without one, or where the system does not tell."""
    if not torch.cuda.is_available():
        return None
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
        return int((pci_devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
