"""The host's time for weights makes a pass longer only if the host is the slowest part."""

from __future__ import annotations

import pytest
import torch

import benchmark_scripts  # noqa: F401  (finds the next three)
from conftest import skip_or_fail
from dynswap_ext import _provider

import host_time  # isort: skip
import shapes  # isort: skip
from virtual_clock import Machine, simulate  # isort: skip

LAYERS, BUS = 40, 50e9
COPY = (64 << 20) / BUS  # seconds that a layer takes on the bus
MACHINE = Machine("a", bus=BUS, arithmetic=1e30, memory=1e30)  # computes in no time


@pytest.fixture
def weights() -> list[tuple[str, int, float, int]]:
    if reason := _provider.native_unavailable(torch.device("cpu")):
        skip_or_fail(reason, cuda=False)
    return MACHINE.workload([shapes.Layer(f"layer{unit}", 32 << 20, 0.0, unit) for unit in range(LAYERS)])


def seconds(weights: list[tuple[str, int, float, int]], weight: float, kernel: float) -> float:
    result = simulate(weights, 0, BUS, passes=6, host=(weight, kernel))
    assert result["moved_bytes"] == LAYERS * (64 << 20)
    return float(result["seconds_per_pass"])


def test_the_slowest_host_takes_the_time_of_each_weight_and_each_call(
    weights: list[tuple[str, int, float, int]],
) -> None:
    assert seconds(weights, 10 * COPY, 0.0) == pytest.approx(LAYERS * 10 * COPY, rel=1e-3)
    assert seconds(weights, 10 * COPY, 5 * COPY) == pytest.approx(LAYERS * 15 * COPY, rel=1e-3)


def test_a_quick_host_is_hidden_by_the_copies(weights: list[tuple[str, int, float, int]]) -> None:
    free = seconds(weights, 0.0, 0.0)
    assert free == pytest.approx(LAYERS * COPY, rel=0.01)
    assert free <= seconds(weights, COPY / 10, 0.0) <= free + 3 * COPY / 10


def test_slowdown_is_in_per_cent(weights: list[tuple[str, int, float, int]]) -> None:
    assert host_time.slowdown(weights, MACHINE, 0.0, 6) == 0
    assert 0 <= host_time.slowdown(weights, MACHINE, COPY / 100, 6) < 1
    assert host_time.slowdown(weights, MACHINE, 10 * COPY, 6) == pytest.approx(900, rel=0.1)
