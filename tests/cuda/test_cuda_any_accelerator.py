"""What an install promises on every accelerator, with the vendor's toolkit or without it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu
from sample_activations import ACTIVATION, LIMIT, ROWS, WIDTH, Stack

PASSES, BUDGET = 6, 3 * LAYER_BYTES


def test_weights_stream_ahead_within_their_budget(gpu: Gpu) -> None:
    model = Exact()
    gpu.pin(model)
    moved = testing.moved(model, gpu.device)
    handle = gpu.install(model, prefetch=2, budget=BUDGET)
    assert handle.backend == gpu.provider.expected_backend
    inputs = [gpu.whole_numbers(seed=seed, dtype=torch.float32) for seed in range(PASSES)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        for _ in range(2):
            model(inputs[0])
        gpu.synchronise()
        handle.reset_stats()
        if not gpu.native:  # pure Python copies pageable memory, for which torch waits
            testing.assert_bit_equal([model(x) for x in inputs], expected)
            return
        with gpu.silent():
            outputs = [model(x) for x in inputs]
    gpu.synchronise()
    testing.assert_bit_equal(outputs, expected)
    stats = handle.stats()
    assert stats.bytes_moved >= PASSES * (LAYERS - 3) * LAYER_BYTES
    assert stats.misses == stats.host_synchronisations == stats.overflow_bytes == 0
    assert stats.peak_bytes <= BUDGET


def test_gradients_are_those_of_the_moved_model(gpu: Gpu) -> None:
    model = Exact()
    gpu.pin(model)
    moved = testing.moved(model, gpu.device)
    gpu.install(model, prefetch=2, budget=BUDGET)
    for seed in range(3):
        x = gpu.whole_numbers(seed=seed, dtype=torch.float32)
        for each in (model, moved):
            each(x).sum().backward()
    gpu.synchronise()
    for ours, theirs in zip(model.parameters(), moved.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        testing.assert_bit_equal(ours.grad, theirs.grad.to(ours.grad.device))


@pytest.mark.parametrize("tier", ["RAM", "file"])
def test_saved_tensors_leave_and_come_back_without_a_wait_of_the_host(
    gpu: Gpu, tmp_path: Path, tier: str
) -> None:
    if not gpu.native:
        pytest.skip("pure Python refuses activations=")
    model = Stack()
    gpu.pin(model)
    moved = testing.moved(model, gpu.device, torch.float64)
    options = {}
    if tier == "file":  # beside the masters and 64 MiB of staging there is room for two tensors in float64
        masters = sum(p.nbytes for p in model.parameters())
        options = {"host_budget": masters + (64 << 20) + 4 * ACTIVATION, "activations_folder": tmp_path}
    handle = gpu.install(model, dtype=torch.float64, budget="300KiB", activations=2 * LIMIT, **options)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, device=gpu.device, requires_grad=True)

    def step(of: Stack) -> torch.Tensor:
        return torch.autograd.grad(of(x).square().mean(), x)[0]  # those of masters go to the host

    for _ in range(3):
        step(model)
    gpu.synchronise()
    handle.reset_stats()
    # Without the toolkit, the threads that read files wait for the copies from their buffers.
    silent = tier == "RAM" or gpu.provider.expected_backend == "cuda"
    with gpu.silent() if silent else nullcontext():
        found = step(model)
    gpu.synchronise()
    testing.assert_bit_equal(found, step(moved))
    stats = handle.stats()
    assert stats.host_synchronisations == 0
    assert tier == "file" or stats.misses == 0  # what is still being written is not fetched ahead
    assert stats.offloaded_bytes > LAYERS * ACTIVATION
    assert stats.bytes_moved > 0
    assert handle.report().rows[-1].source == ("file" if tier == "file" else "pinned RAM")
