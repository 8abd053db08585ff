"""On a machine with several NUMA nodes, `dynswap info` names the device's node and the process's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext._util import numa
from gpu_under_test import Gpu


@pytest.fixture(autouse=True)
def nodes(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that there are two nodes, and that the process is on node 0. Return their folder."""
    only_cuda_has("the place on the bus, in torch")
    if not pretend_cuda.active():
        pytest.skip("a real device is where it is")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    own = ",".join(f"{cpu}-{cpu}" if cpu % 2 else str(cpu) for cpu in sorted(os.sched_getaffinity(0)))
    for node, processors in enumerate((own, "4096-4100,5000")):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path / "node")
    monkeypatch.setattr(numa, "_DEVICES", tmp_path / "pci")
    return tmp_path


def put(folder: Path, node: int) -> str:
    """Place all devices on a node, and return the text of `info`."""
    for index in range(torch.cuda.device_count()):
        place = folder / f"pci/0000:{0x3B + index:02x}:00.0"
        place.mkdir(parents=True, exist_ok=True)
        (place / "numa_node").write_text(f"{node}\n")
    return dynswap_ext.backend_info(ask_driver=True).facts().get("NUMA", "")


def test_the_other_node(nodes: Path) -> None:
    said = put(nodes, 1)
    assert "is beside node 1, and this process may run on node 0:" in said
    assert "`numactl --cpunodebind=1 --preferred=1`" in said


def test_the_same_node(nodes: Path) -> None:
    assert put(nodes, 0).endswith("is beside node 0, as is this process")


def test_nothing_is_said_where_the_system_does_not_tell(nodes: Path) -> None:
    assert put(nodes, -1) == ""
    (nodes / "pci").rename(nodes / "moved")
    assert dynswap_ext.backend_info(ask_driver=True).numa == ""


def test_nothing_is_said_of_one_node(nodes: Path) -> None:
    (nodes / "node/node1").rename(nodes / "moved")
    assert put(nodes, 0) == ""
