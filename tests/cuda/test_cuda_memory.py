"""The peak of device memory is what was allowed, all of it is freed, and a lack of it is survived."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import testing
from dynswap_ext._swap.module_registry import served_by
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

#: Bytes of a layer in float64.
LAYER = 2 * LAYER_BYTES
SLACK = 1 << 20


def peak_of_activations(gpu: Gpu, moved: nn.Module, x: torch.Tensor) -> int:
    """Return the memory that a pass of the moved model takes besides weights and torch's workspaces."""
    with torch.no_grad():
        moved(x)
        with gpu.peak() as peak:
            moved(x)
    return peak.bytes


@pytest.mark.parametrize("budget", [3 * LAYER, 5 * LAYER], ids=["ring", "ring and residents"])
def test_peak_is_the_budget_and_the_activations(gpu: Gpu, budget: int) -> None:
    model = Exact().double().eval()  # no cast, so that nothing but the weights crosses
    moved = testing.moved(model, gpu.device, torch.float64)
    x = gpu.whole_numbers()
    activations = peak_of_activations(gpu, moved, x)
    with gpu.peak() as peak:
        handle = gpu.install(model, dtype=torch.float64, budget=budget)
        with torch.no_grad():
            for _ in range(3):
                model(x)
    stats = handle.stats()
    assert stats.bytes_moved >= LAYERS * LAYER_BYTES
    assert stats.overflow_bytes == 0 and stats.peak_bytes <= budget
    assert LAYER <= peak.bytes <= budget + activations + SLACK
    assert stats.weight_bytes > budget


def test_all_of_it_comes_back(gpu: Gpu) -> None:
    model = Exact(layers=3).eval()
    moved = testing.moved(model, gpu.device, torch.float64)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        gc.collect()  # of other tests
        before = gpu.allocated()
        for budget in (None, "1GiB", 3 * LAYER):
            with gpu.install(model, dtype=torch.float64, budget=budget):
                testing.assert_bit_equal(model(x), expected)
            gc.collect()
            assert gpu.allocated() == before, f"device memory left behind with budget {budget}"
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_model_that_dies_takes_its_memory_along(gpu: Gpu) -> None:
    x = gpu.whole_numbers()
    moved = Exact(layers=1).to(gpu.device, torch.float64)
    with torch.no_grad():
        moved(x)
        other = Exact(layers=1).eval()
        with gpu.install(other, dtype=torch.float64):
            other(x)  # pure Python keeps one element of each dtype from then on
        gc.collect()  # of other tests
        before = gpu.allocated()
        model = Exact(layers=3).eval()
        dynswap_ext.install(model, device=gpu.device, provider=gpu.provider.backend, dtype=torch.float64)
        model(x)
        del model
    gc.collect()
    gpu.synchronise()
    assert gpu.allocated() == before


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("budget", [5 * LAYER, "minimum", "auto"])
def test_no_room_for_the_budget(gpu: Gpu, budget: int | str) -> None:
    """An install without room is refused and leaves nothing. In pure Python, the first call is refused."""
    model = Exact().eval()
    moved = testing.moved(model, gpu.device, torch.float64)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        before = set(served_by)
        with gpu.room_for(LAYER // 2):
            if gpu.native:
                with pytest.raises(dynswap_ext.OutOfMemoryError, match="no room"):
                    gpu.install(model, dtype=torch.float64, budget=budget)
                assert set(served_by) == before
                assert not dynswap_ext.is_installed(model) and type(model) is Exact
                assert all("_dynswap" not in vars(module) for module in model.modules())
                assert model.layers[0].weight.device.type == "cpu"
            else:
                gpu.install(model, dtype=torch.float64, budget=budget)
                with pytest.raises(dynswap_ext.OutOfMemoryError, match="no device memory"):
                    model(x)
                dynswap_ext.uninstall(model)
        gpu.install(model, dtype=torch.float64, budget=5 * LAYER)
        testing.assert_bit_equal(model(x), expected, "after there was room again")


def test_activations_that_do_not_fit(gpu: Gpu) -> None:
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=3 * LAYER)
    x = gpu.whole_numbers()
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
        large = gpu.whole_numbers(rows=16 * 1024)  # 151 MB each
        with gpu.room_for(64 << 20), pytest.raises(torch.OutOfMemoryError):
            model(large)
        gc.collect()
        testing.assert_nothing_held(handle)
        testing.assert_bit_equal(model(x), moved(x), "after the failed pass")
    assert handle.stats().overflow_bytes == 0


def test_what_is_kept_is_counted_and_given_back(gpu: Gpu) -> None:
    model = Exact().eval()
    gc.collect()  # of other tests
    before = gpu.allocated()
    handle = gpu.install(model, dtype=torch.float64, budget=3 * LAYER)
    with pytest.warns(dynswap_ext.DynswapWarning):
        kept = [layer.weight for layer in model.layers]
    gpu.synchronise()
    for weight, master in zip(kept, model.parameters(), strict=True):
        testing.assert_bit_equal(weight.detach().cpu(), master.detach().double())
    if gpu.native:
        assert handle.stats().overflow_bytes >= (LAYERS - 3) * LAYER
    del kept, weight
    handle.uninstall()
    gc.collect()
    assert gpu.allocated() == before
