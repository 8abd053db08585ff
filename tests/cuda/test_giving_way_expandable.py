"""Residents of `budget="auto"` where torch has expandable segments: memory that is lent would be used.

See Note [When torch's allocator asks].
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext import testing
from gpu_under_test import Gain, Gpu, gains

only_cuda_has("an allocator that asks for memory to be freed", whole_module=True)

LAYERS, LAYER = 16, Gain.BYTES
#: On the pretend device less, as all of it is.
MIB = LAYER // 16
WIDTH = LAYER // 4


@pytest.fixture(autouse=True)
def _expandable_segments(gpu: Gpu) -> Iterator[None]:
    if not gpu.native:
        pytest.skip("the pure-Python provider's residents do not give way")
    if pretend_cuda.active():
        pretend_cuda.faults().segment_bytes = 2 * MIB
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # torch 2.11 does not tell
    before = tell()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    if before:
        torch._C._accelerator_setAllocatorSettings(before)


def model_and_answer(gpu: Gpu, x: Tensor) -> tuple[nn.Module, Tensor]:
    model = gains(LAYERS)
    moved = testing.moved(model, gpu.device)
    return model, run(moved, x)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).cpu()


def test_memory_that_is_not_short_costs_no_resident(gpu: Gpu) -> None:
    x = gpu.provider.randn(1, WIDTH, dtype=torch.float32)
    model, expected = model_and_answer(gpu, x)
    with gpu.room_for(4 * LAYERS * LAYER), gpu.install(model, budget="auto") as handle:
        for _ in range(4):
            assert torch.equal(run(model, x), expected)
        before = handle.stats()
        assert before.resident_groups == before.groups
        cache = [torch.empty(size * MIB, dtype=torch.uint8, device=gpu.device) for size in (24, 40, 56, 72)]
        for _ in range(4):
            assert torch.equal(run(model, x), expected)
        after = handle.stats()
        assert after.given_way == 0 and after.resident_groups == before.resident_groups
        assert after.bytes_moved == before.bytes_moved
        del cache


def test_where_memory_is_short_the_call_ends_and_the_next_has_room(gpu: Gpu) -> None:
    small = gpu.provider.randn(1, WIDTH, dtype=torch.float32)
    large = gpu.provider.randn(8, WIDTH, dtype=torch.float32)  # activations of 128 MiB, two of them at a time
    model, expected = model_and_answer(gpu, small)
    with gpu.room_for(LAYERS * LAYER + 96 * MIB), gpu.install(model, budget="auto") as handle:
        for _ in range(4):
            assert torch.equal(run(model, small), expected)
        with pytest.raises(torch.OutOfMemoryError), pytest.warns(match="the next call has more room"):
            run(model, large)
        gc.collect()
        for _ in range(4):
            assert torch.equal(run(model, small), expected)
        assert handle.stats().given_way == 0


def test_the_report_says_so_and_what_to_do(gpu: Gpu) -> None:
    handle = gpu.install(Gain(), budget="auto")
    told = handle.report().giving_way
    assert told is not None and told.startswith("give way to other weights only: with expandable segments")
    assert "expandable_segments:False" in told
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert handle.report().giving_way == ""
