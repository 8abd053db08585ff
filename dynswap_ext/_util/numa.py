"""Tells to which NUMA node of the machine a device is attached, and on which nodes this process may run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

_DEVICES: Final = Path("/sys/bus/pci/devices")
_NODES: Final = Path("/sys/devices/system/node")


def place_of(device: torch.device) -> str:
    """Return a sentence on the NUMA nodes of a device and of this process.

    It is empty if the machine has only one node, or does not tell that of the device.
    """
    nodes = {int(folder.name[4:]): folder for folder in _NODES.glob("node[0-9]*")}
    node = _node_of(device)
    if len(nodes) < 2 or node not in nodes:
        return ""
    allowed = os.sched_getaffinity(0)
    own = sorted(number for number, folder in nodes.items() if allowed & _processors(folder))
    if own == [node]:
        return f"{device} is beside node {node}, as is this process"
    others = "node " + " or ".join(map(str, own))
    return (
        f"{device} is beside node {node}, and this process may run on {others}: memory of another node is "
        f"slower to copy from. Start it with `numactl --cpunodebind={node} --preferred={node}`"
    )


def _node_of(device: torch.device) -> int | None:
    ask = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    if ask is None:
        return None
    try:
        properties = ask(device)
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return int((_DEVICES / bus / "numa_node").read_text())
    except (AssertionError, AttributeError, OSError, RuntimeError, ValueError):
        return None


def _processors(node: Path) -> set[int]:
    """Return the numbers of a node's processors, which the system lists as in "0-3,8-11"."""
    processors: set[int] = set()
    for part in filter(None, (node / "cpulist").read_text().strip().split(",")):
        first, _, last = part.partition("-")
        processors.update(range(int(first), int(last or first) + 1))
    return processors
