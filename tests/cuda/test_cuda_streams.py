"""Order on the device: delays are placed where a missing wait would let wrong bytes be read.

A kernel that only spins delays a stream while the host runs ahead, and a busy bus makes copies late. Outputs
are compared to the bit. Without the waits (invariants 1 and 2) these tests fail.
"""

from __future__ import annotations

import gc

import pytest
import torch

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, WIDTH, Exact, Gpu

LAYER = 2 * LAYER_BYTES  # in float64
RING = 3 * LAYER
DELAY = 20.0  # milliseconds: a pass's copies take some 1
INPUTS = 3


def test_readers_that_are_late(gpu: Gpu) -> None:
    """A slot is overwritten only after its last reader, though passes queue up behind a late stream."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=RING)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(INPUTS)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        model(inputs[0])
        gpu.synchronise()
        outputs = []
        for x in inputs:
            gpu.delay(DELAY)
            outputs.append(model(x))
    gpu.synchronise()
    testing.assert_bit_equal(outputs, expected)
    assert handle.stats().overflow_bytes == 0
    assert handle.stats().bytes_moved >= INPUTS * (LAYERS - 3) * LAYER_BYTES


def test_copies_that_are_late(gpu: Gpu) -> None:
    """A tensor is read after its copy, though in the first pass nothing is prefetched and the bus is busy."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=RING)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(INPUTS)]
    outputs = []
    with torch.no_grad():
        for x in inputs:
            gpu.congest()
            outputs.append(model(x))
    gpu.synchronise()
    with torch.no_grad():
        testing.assert_bit_equal(outputs, [moved(x) for x in inputs])
    assert handle.stats().bytes_moved >= INPUTS * (LAYERS - 3) * LAYER_BYTES


@pytest.mark.parametrize("prefetch", [0, 1, 2, 8])
def test_passes_on_streams_of_the_users_own(gpu: Gpu, prefetch: int) -> None:
    """Passes on different streams, none of which waits for another, are right though all are late."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, prefetch=prefetch)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(INPUTS)]
    gpu.synchronise()
    outputs = []
    with torch.no_grad():
        for number, x in enumerate(inputs):
            with gpu.on(gpu.new_stream()):
                gpu.delay(DELAY * (INPUTS - number))  # the first is the latest
                outputs.append(model(x))
        gpu.synchronise()
        testing.assert_bit_equal(outputs, [moved(x) for x in inputs])
    assert handle.stats().bytes_moved > 0


def test_one_handed_out_tensor_on_two_streams(gpu: Gpu) -> None:
    """A second stream may read a tensor that the first has, long after the first is done with it."""
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=RING)
    x, other = gpu.whole_numbers(seed=1), gpu.new_stream()
    with torch.no_grad():
        expected = moved.layers[0](x)
        passes = [moved(x)] * 2
        gpu.synchronise()
        weight = model.layers[0].weight
        here = torch.nn.functional.linear(x, weight)
        with gpu.on(other):
            again = model.layers[0].weight
            assert again is weight
            gpu.delay(DELAY)
            there = torch.nn.functional.linear(x, again)
        del weight, again
        outputs = [model(x) for _ in range(2)]  # the ring goes round, twice
    gpu.synchronise()
    testing.assert_bit_equal([here, there], [expected, expected])
    testing.assert_bit_equal(outputs, passes)


def test_a_view_is_a_reader(gpu: Gpu) -> None:
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=RING)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved.layers[0].weight[:5].detach().clone()
        gpu.synchronise()
        view = model.layers[0].weight[:5]
        gpu.delay(DELAY)
        for _ in range(2):
            model(x)
        copy = view.clone()
        del view
        model(x)
    gpu.synchronise()
    testing.assert_bit_equal(copy, expected)


@pytest.mark.parametrize("way", ["uninstall", "the model dies"])
def test_the_arena_outlives_its_readers(gpu: Gpu, way: str) -> None:
    """Memory of an ended install is not reused while kernels of another stream still read it."""
    model = Exact().eval()
    moved = testing.moved(model, gpu.device, torch.float64)
    handle = gpu.install(model, dtype=torch.float64, budget=RING)
    x, other = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        expected = moved(x)
        model(x)
        gpu.synchronise()
        with gpu.on(other):
            gpu.delay(DELAY)
            output = model(x)
        if way == "uninstall":
            handle.uninstall()
        else:
            del model
            gc.collect()
        filled = [torch.full_like(expected, float("nan")).repeat(WIDTH // 4, 1) for _ in range(3)]
    gpu.synchronise()
    testing.assert_bit_equal(output, expected)
    assert all(each.nbytes == LAYER for each in filled)


def test_masters_written_while_copies_of_them_are_under_way(gpu: Gpu) -> None:
    """Prefetched weights that were copied while their masters were written are never used."""
    if not gpu.native:
        pytest.skip("pure Python reads nothing ahead")
    model = Exact().eval()
    _, handle = gpu.pair(model, budget=RING)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for number in range(3):
            gpu.congest()
            model(x)
            gpu.done()  # the pass is over, so masters that it read may be written
            for p in model.parameters():
                p.neg_() if number else p.add_(1)
            expected = testing.moved(model, gpu.device, torch.float64)(x)
            testing.assert_bit_equal(model(x), expected, f"after write {number}")
    assert handle.stats().bytes_moved >= 3 * LAYERS * LAYER_BYTES


@pytest.mark.parametrize("layers", [3, 5, None], ids=["ring", "some resident", "all resident"])
def test_no_host_synchronisation_in_the_steady_state(gpu: Gpu, layers: int | None) -> None:
    if not gpu.native:
        pytest.skip("pure Python copies pageable memory, for which torch waits")
    model = Exact().eval()
    gpu.pin(model)
    budget = layers * LAYER_BYTES // 2 if layers else "1GiB"
    moved, handle = gpu.pair(model, torch.bfloat16, budget=budget)
    x = gpu.whole_numbers(dtype=torch.bfloat16)
    with torch.no_grad():
        expected = moved(x)
        for _ in range(2):
            model(x)
        gpu.synchronise()
        before = handle.stats()
        with gpu.silent():
            outputs = [model(x) for _ in range(6)]
        after = handle.stats()
    gpu.synchronise()
    testing.assert_bit_equal(outputs, [expected] * 6)
    assert after.host_synchronisations == before.host_synchronisations
    moved_bytes = after.bytes_moved - before.bytes_moved
    assert moved_bytes > 0 if layers else moved_bytes == 0


def test_the_host_runs_ahead(gpu: Gpu) -> None:
    """A pass is queued while the device still stands idle: no call of it waits for the device."""
    if not gpu.native:
        pytest.skip("pure Python copies pageable memory, for which torch waits")
    model = Exact().eval()
    gpu.pin(model)
    gpu.pair(model, budget=RING)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(3):
            model(x)
        gpu.synchronise()
        gpu.delay(500)
        model(x)
        ended = gpu.record()
        assert not ended.query(), "the host came back from a pass after the device had done it"
    gpu.synchronise()
