"""What an install promises on every accelerator, with the vendor's toolkit or without it."""

from __future__ import annotations

import torch

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

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
