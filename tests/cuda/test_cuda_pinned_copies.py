"""If the device cannot read memory that is locked in place, large masters have page-locked copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

PASSES = 3


@pytest.fixture(autouse=True)
def _locks_nothing_in_place(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("pure Python does not page-lock")
    if gpu.device.type == "cuda":
        pytest.skip("CUDA locks masters in place")


def test_from_the_third_pass_on_the_device_reads_the_copies(gpu: Gpu) -> None:
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=3 * 2 * LAYER_BYTES)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(PASSES)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        testing.assert_bit_equal([model(x) for x in inputs], expected)
        gpu.synchronise()
        handle.reset_stats()
        with gpu.silent():  # for a staged master, a thread would wait for its buffer
            outputs = [model(x) for x in inputs]
    gpu.synchronise()
    testing.assert_bit_equal(outputs, expected)
    stats = handle.stats()
    assert stats.host_synchronisations == 0 and stats.misses == 0
    assert stats.bytes_moved >= (PASSES - 1) * (LAYERS - 3) * LAYER_BYTES


def with_numpy(model: Exact, layer: int) -> None:
    model.state_dict()[f"layers.{layer}.weight"].numpy()[-1, -1] += 1


def in_place(model: Exact, layer: int) -> None:
    with torch.no_grad():
        model.layers[layer].weight[0] += 1


def with_another(model: Exact, layer: int) -> None:
    weight = model.layers[layer].weight
    weight.data = weight.detach() + 1


@pytest.mark.parametrize("write", [with_numpy, in_place, with_another])
@pytest.mark.parametrize("every", [1, 3])
def test_a_write_to_a_master_is_read(gpu: Gpu, write: Callable[[Exact, int], None], every: int) -> None:
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=3 * 2 * LAYER_BYTES)
    x = gpu.whole_numbers()
    for turn in range(8):
        if turn % every == 0:
            gpu.synchronise()
            write(model, turn % LAYERS)
            moved = testing.moved(model, gpu.device, torch.float64)
        with torch.no_grad():
            testing.assert_bit_equal(model(x), moved(x))


def test_copies_take_no_more_than_was_allowed(gpu: Gpu) -> None:
    model = Exact().eval()
    taken = 1 << (LAYER_BYTES - 1).bit_length()  # torch's allocator takes this for one copy
    host_budget = sum(p.nbytes for p in model.parameters()) + 2 * taken + (64 << 20)  # with buffers
    moved, handle = gpu.pair(model, budget=3 * 2 * LAYER_BYTES, host_budget=host_budget)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(PASSES):
            testing.assert_bit_equal(model(x), moved(x))
    sources = [row["source"] for row in handle.report().as_dict()["groups"]]
    assert sources.count("pinned RAM") == 2
    host = handle.report().host
    assert host is not None and host.copies == 2 * taken
    assert f"{host.copies >> 10} KiB of page-locked copies" in str(host)
