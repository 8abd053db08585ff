"""The free RAM is what the limits of control groups leave, for both versions and any parent group."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dynswap_ext
from dynswap_ext import DynswapWarning, config
from dynswap_ext._util import memory
from sample_models import mlp

GIB = 1 << 30
Group = Callable[..., None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_GROUPS_OF_PROCESS", tmp_path / "of_process")
    return tmp_path


def group(
    folder: Path,
    names: tuple[str, str, tuple[str, str]],
    limit: int | str,
    used: int,
    cached: int = 0,
    active: int = 0,
) -> None:
    """Write the files of a group. `cached` are file pages that were read once, `active` several times."""
    folder.mkdir(parents=True, exist_ok=True)
    total = "total_" if names is memory._FILES_OF_VERSION_1 else ""  # with those of the groups below
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\n{total}inactive_file {cached}\n{total}active_file {active}\n{total}unevictable 7\n"
    )


def test_version_2(groups: Path) -> None:
    (groups / "of_process").write_text("0::/user.slice/job_7\n")
    names = memory._FILES_OF_VERSION_2
    group(groups / "cgroup/user.slice/job_7", names, "max", 3 * GIB)
    assert memory._free_in_group() == math.inf
    group(groups / "cgroup/user.slice", names, 8 * GIB, 5 * GIB, GIB)
    assert memory._free_in_group() == 4 * GIB
    group(groups / "cgroup/user.slice/job_7", names, 4 * GIB, 3 * GIB)
    assert memory._free_in_group() == GIB
    assert memory.ram_limit() <= 4 * GIB


def test_version_1(groups: Path) -> None:
    (groups / "of_process").write_text("5:cpu,cpuacct:/a\n4:memory:/docker/0123\n1:name=systemd:/\n0::/\n")
    names = memory._FILES_OF_VERSION_1
    group(groups / "cgroup/memory", names, 2 * GIB, GIB, GIB // 2)  # a container's view of its group
    assert memory._free_in_group() == 3 * GIB // 2
    assert memory.ram_limit() <= 2 * GIB
    group(groups / "cgroup/memory", names, 9223372036854771712, GIB)  # no limit
    assert memory._free_in_group() > 1 << 60


def test_a_container_whose_root_is_its_own(groups: Path) -> None:
    (groups / "of_process").write_text("0::/\n")
    group(groups / "cgroup", memory._FILES_OF_VERSION_2, 2 * GIB, 3 * GIB)
    assert memory._free_in_group() == 0
    assert config.resolve(device="cpu").host_budget.locked <= 0.8 * 2 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_all_cached_file_pages_are_free(groups: Path, version: int) -> None:
    """All cached file pages count as free, as in the machine's MemAvailable.

    The system also takes back pages that were read several times.
    """
    names = memory._FILES_OF_VERSION_1 if version == 1 else memory._FILES_OF_VERSION_2
    (groups / "of_process").write_text("4:memory:/\n" if version == 1 else "0::/\n")
    folder = groups / "cgroup" / ("memory" if version == 1 else "")
    group(folder, names, 40 << 20, 36 << 20, cached=2 << 20, active=30 << 20)
    handle = dynswap_ext.install(mlp(), device="cpu", dtype=torch.float64, budget=1.0)
    assert handle.budget == 36 << 20


@pytest.mark.parametrize("budget", [3 * GIB, "3GiB"])
def test_a_budget_over_the_ram_is_said(groups: Path, budget: int | str) -> None:
    (groups / "of_process").write_text("0::/\n")
    group(groups / "cgroup", memory._FILES_OF_VERSION_2, 2 * GIB, GIB)
    model = mlp()
    said = r"the budget is 3 GiB, and this process may use 2 GiB of RAM: .*Pass a smaller budget"
    with pytest.warns(DynswapWarning, match=said) as caught:
        handle = dynswap_ext.install(model, device="cpu", dtype=torch.float64, budget=budget)
    assert len(caught) == 1
    with pytest.warns(DynswapWarning, match=said):
        handle.retune(budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for enough in (2 * GIB, 1.0, "minimum", "auto"):
            dynswap_ext.install(model, device="cpu", dtype=torch.float64, budget=enough)
        config.resolve_budget(3 * GIB, torch.device("cuda"))  # a GPU has its own memory


def test_without_control_groups(groups: Path) -> None:
    assert memory._free_in_group() == math.inf
    assert memory.ram_limit() == memory.all_bytes(memory.torch.device("cpu"))
