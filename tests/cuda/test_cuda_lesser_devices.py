"""Accelerators that lack something: results are right within the budget, and one warning names the lack."""

from __future__ import annotations

import warnings

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import ENGINE
from dynswap_ext import _provider, testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

BUDGET = 3 * LAYER_BYTES
#: What a device may lack, and a part of the warning.
LACKS = {
    "one_stream": "one stream only",  # first: a process keeps the streams that it has got
    "no_default_stream": "",
    "no_priorities": "",
    "no_pinned_memory": "no pinned memory",
    "synchronous_copies": "",
}


@pytest.fixture(params=LACKS, autouse=True)
def lack(gpu: Gpu, request: pytest.FixtureRequest) -> str:
    if not pretend_cuda.active():
        pytest.skip("a true device has what it has")
    if ENGINE == "cuda":
        pytest.skip("every NVIDIA GPU has all of it")
    _provider._warn_once.cache_clear()
    lack: str = request.param
    setattr(pretend_cuda.faults(), lack, True)
    return lack


def install(gpu: Gpu, lack: str, model: torch.nn.Module) -> dynswap_ext.Handle:
    """Install with a budget for half the layers, and check the warnings."""
    if lack != "no_pinned_memory":
        gpu.pin(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = gpu.install(model, prefetch=2, budget=BUDGET)
        handle.retune()
    said = [str(one.message) for one in caught if issubclass(one.category, dynswap_ext.DynswapWarning)]
    if LACKS[lack] and gpu.native:
        assert len([text for text in said if LACKS[lack] in text]) == 1, said
    return handle


def test_passes(gpu: Gpu, lack: str) -> None:
    model = Exact()
    moved = testing.moved(model, gpu.device)
    handle = install(gpu, lack, model)
    inputs = [gpu.whole_numbers(seed=seed, dtype=torch.float32) for seed in range(4)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        handle.reset_stats()
        testing.assert_bit_equal([model(x) for x in inputs], expected)
    stats = handle.stats()
    assert stats.bytes_moved >= len(inputs) * (LAYERS - 3) * LAYER_BYTES
    assert stats.peak_bytes <= BUDGET and stats.overflow_bytes == 0


def test_training(gpu: Gpu, lack: str) -> None:
    model = Exact()
    moved = testing.moved(model, gpu.device)
    handle = install(gpu, lack, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in (model, moved)]
    for seed in range(3):
        x = gpu.whole_numbers(seed=seed, dtype=torch.float32)
        for each, optimizer in zip((model, moved), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).sum().backward()
            optimizer.step()
    testing.assert_bit_equal(
        [p.detach() for p in model.parameters()], [p.detach().cpu() for p in moved.parameters()]
    )
    assert handle.stats().overflow_bytes == 0
