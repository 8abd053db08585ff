"""A new plan replaces the old one on the device: both are never there at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu

LAYER = 2 * LAYER_BYTES  # in float64
BUDGET = 5 * LAYER
DELAY = 20.0  # milliseconds


def joined(model: nn.Module, handle: dynswap_ext.Handle) -> None:
    """Add masters that the plan does not know."""
    model.layers.append(nn.Identity())
    model.layers[0].bias = nn.Parameter(torch.zeros(model.layers[0].out_features))


def retuned(model: nn.Module, handle: dynswap_ext.Handle) -> None:
    handle.retune(BUDGET - LAYER)


@pytest.mark.parametrize("change", [joined, retuned])
def test_there_is_no_room_for_two_plans(
    gpu: Gpu, change: Callable[[nn.Module, dynswap_ext.Handle], None]
) -> None:
    """A new plan takes the old one's memory while readers of that are queued on another stream."""
    if not gpu.native:
        pytest.skip("pure Python has no plan")
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=BUDGET)
    x, other = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        expected = moved(x)
        with gpu.on(other):
            moved(x)  # cuBLAS takes its workspace for the stream
        for _ in range(2):
            model(x)
        gpu.synchronise()
        change(model, handle)
        outputs = []
        with gpu.room_for(LAYER), warnings.catch_warnings():
            warnings.simplefilter("error", dynswap_ext.DynswapWarning)
            for _ in range(6):
                outputs.append(model(x))
                with gpu.on(other):
                    gpu.delay(DELAY)
                    outputs.append(model(x))
    gpu.synchronise()
    testing.assert_bit_equal(outputs, [expected] * 12)
    assert handle.stats().overflow_bytes == 0
    if change is joined:
        assert handle.stats().weight_bytes > len(moved.layers) * LAYER


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_a_new_plan_that_finds_no_room(gpu: Gpu) -> None:
    """Without room for a new plan, the model goes on with a copy at each access, until a plan works."""
    if not gpu.native:
        pytest.skip("pure Python has no plan")
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=2 * LAYER)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        model(x)
        gpu.synchronise()
        handle.retune(6 * LAYER)
        with gpu.room_for(2 * LAYER):
            outputs = [model(x) for _ in range(5)]
        outputs += [model(x) for _ in range(2)]  # there is room again for a plan
        handle.reset_stats()
        outputs.append(model(x))
        stats = handle.stats()
        assert stats.prefetches or stats.resident_groups, "the weights are copied one by one for ever"
        handle.retune(3 * LAYER)
        outputs += [model(x) for _ in range(5)]
    gpu.synchronise()
    testing.assert_bit_equal(outputs, [expected] * 13)


def test_a_budget_for_which_there_is_no_plan(gpu: Gpu) -> None:
    """The old plan stays if the budget is too small for a new one."""
    if not gpu.native:
        pytest.skip("pure Python has no plan")
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=BUDGET)
    x = gpu.whole_numbers()
    with torch.no_grad():
        model(x)
        model.layers[0] = nn.Linear(x.shape[1], 8 * x.shape[1], bias=False)  # more than the budget
        before = handle.stats()
        with pytest.warns(dynswap_ext.DynswapWarning, match="no new plan fits"), pytest.raises(RuntimeError):
            model(x)  # shapes do not fit
        testing.assert_bit_equal(model.layers[1](x), moved.layers[1](x))
    assert handle.stats().arena_bytes == before.arena_bytes


def test_a_second_install_needs_no_room_beside_the_first(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("pure Python has no plan")
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=BUDGET)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        testing.assert_bit_equal(model(x), expected)
        with gpu.room_for(LAYER):
            handle = gpu.install(model, dtype=torch.float64, budget=BUDGET)
            testing.assert_bit_equal(model(x), expected)
    assert handle.stats().resident_groups and handle.stats().overflow_bytes == 0


def test_a_second_install_that_finds_no_room_leaves_the_first(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("pure Python has no plan")
    model = Exact(layers=12).eval()
    moved, handle = gpu.pair(model, budget=BUDGET)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        testing.assert_bit_equal(model(x), expected)
        for part in (model, model.layers):
            with gpu.room_for(LAYER), pytest.raises(dynswap_ext.OutOfMemoryError):
                gpu.install(part, dtype=torch.float64, budget=len(model.layers) * LAYER)
            assert handle.active and handle.budget == BUDGET
            testing.assert_bit_equal(model(x), expected)
            assert handle.stats().resident_groups and handle.stats().overflow_bytes == 0
