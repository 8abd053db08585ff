"""Residents give way under a real cap, at sizes for which torch's allocator takes segments from the driver.

The other tests of this are exact to the byte, but a device's allocator takes segments of 2 and 20 MiB. With
`PYTORCH_ALLOC_CONF=expandable_segments:True` they run over the allocator's other kind of segment. Residents
do not give way then, because memory that is lent would be used. See Note [When torch's allocator asks].
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext import testing
from gpu_under_test import Gain, Gpu, gains

only_cuda_has("an allocator that asks for memory to be freed", whole_module=True)

LAYERS, LAYER = 16, Gain.BYTES
#: A unit of size, which is less than 1 MiB on the pretend device, like everything there.
MIB = LAYER // 16
WIDTH = LAYER // 4
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
only_fixed_segments = pytest.mark.skipif(
    EXPANDABLE, reason="with expandable segments residents do not give way"
)


@pytest.fixture(autouse=True)
def _segments_of_a_card(gives_way: None) -> None:
    if pretend_cuda.active():
        pretend_cuda.faults().segment_bytes = 2 * MIB


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Let the allocator take expandable segments, as the environment variable would."""
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # torch 2.11 does not tell
    before = tell()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        if before:
            torch._C._accelerator_setAllocatorSettings(before)


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).cpu()


def answers(gpu: Gpu, model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the results of the model moved to the device."""
    moved = testing.moved(model, gpu.device)
    found = [run(moved, x) for x in inputs]
    del moved
    gc.collect()
    return found


def inputs(gpu: Gpu, *rows: int) -> list[Tensor]:
    return [gpu.provider.randn(count, WIDTH, dtype=torch.float32, seed=count) for count in rows]


@only_fixed_segments
def test_an_activation_spike_takes_the_residents_memory(gpu: Gpu) -> None:
    model = gains(LAYERS)
    small, large = inputs(gpu, 1, 8)  # activations of 128 MiB, two of them at a time
    expected = answers(gpu, model, small, large)
    with gpu.room_for(LAYERS * LAYER + 96 * MIB), gpu.install(model, budget="auto") as handle:
        for _ in range(4):
            assert torch.equal(run(model, small), expected[0])
        before = handle.stats()
        assert before.resident_groups > LAYERS // 2 and before.given_way == 0
        assert torch.equal(run(model, large), expected[1])
        after = handle.stats()
        assert after.given_way > 0
        assert after.given_way_bytes == before.resident_bytes - after.resident_bytes
        assert torch.equal(run(model, small), expected[0])
        assert torch.equal(run(model, large), expected[1])


def test_without_automatic_residents_the_spike_ends_the_call(gpu: Gpu) -> None:
    """Without residents that give way, the spike of the test above ends the call, so the cap is effective."""
    model = gains(LAYERS)
    small, large = inputs(gpu, 1, 8)
    answers(gpu, model, small, large)
    with gpu.room_for(LAYERS * LAYER + 96 * MIB), gpu.install(model, budget=(LAYERS - 2) * LAYER):
        run(model, small)
        run(model, small)
        with pytest.raises(torch.OutOfMemoryError):
            run(model, large)


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable segments"])
def test_memory_that_is_not_short_costs_no_resident(gpu: Gpu, expandable: bool) -> None:
    """No resident gives way to a growing cache, each of whose blocks is new, as long as there is memory."""
    with expandable_segments() if expandable else nullcontext():
        model = gains(LAYERS)
        (x,) = inputs(gpu, 1)
        (expected,) = answers(gpu, model, x)
        with gpu.room_for(4 * LAYERS * LAYER), gpu.install(model, budget="auto") as handle:
            for _ in range(4):
                assert torch.equal(run(model, x), expected)
            before = handle.stats()
            assert before.resident_groups == before.groups
            sizes = (3, 12, 24, 36, 48, 72)
            kept = [torch.empty(size * MIB, dtype=torch.uint8, device=gpu.device) for size in sizes]
            for _ in range(4):
                assert torch.equal(run(model, x), expected)
            after = handle.stats()
            assert after.given_way == 0 and after.resident_groups == before.resident_groups
            assert after.bytes_moved == before.bytes_moved
            del kept


def test_with_expandable_segments_the_call_ends_and_the_next_has_room(gpu: Gpu) -> None:
    with expandable_segments():
        model = gains(LAYERS)
        small, large = inputs(gpu, 1, 8)
        (expected,) = answers(gpu, model, small)
        with gpu.room_for(LAYERS * LAYER + 96 * MIB), gpu.install(model, budget="auto") as handle:
            for _ in range(4):
                assert torch.equal(run(model, small), expected)
            with pytest.raises(torch.OutOfMemoryError), pytest.warns(match="the next call has more room"):
                run(model, large)
            gc.collect()
            for _ in range(4):
                assert torch.equal(run(model, small), expected)
            assert handle.stats().given_way == 0


def test_the_report_says_so_of_expandable_segments_and_what_to_do(gpu: Gpu) -> None:
    with expandable_segments():
        handle = gpu.install(Gain(), budget="auto")
        told = handle.report().giving_way
        assert told is not None
        assert told.startswith("give way to other weights only: with expandable segments")
        assert "expandable_segments:False" in told
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        assert handle.report().giving_way == ""


@only_fixed_segments
def test_a_cache_that_grows_takes_residents_one_after_the_other(gpu: Gpu) -> None:
    model = gains(LAYERS)
    (x,) = inputs(gpu, 1)
    (expected,) = answers(gpu, model, x)
    with gpu.room_for(LAYERS * LAYER + 96 * MIB), gpu.install(model, budget="auto") as handle:
        for _ in range(3):
            run(model, x)
        cache = []
        for step in range(8):
            cache.append(torch.full((24 * MIB,), step, dtype=torch.uint8, device=gpu.device))
            assert torch.equal(run(model, x), expected)
        assert handle.stats().given_way >= 4
        assert all(bool((kept == step).all()) for step, kept in enumerate(cache))
        cache.clear()
        assert torch.equal(run(model, x), expected)


@only_fixed_segments
def test_training_under_a_cap(gpu: Gpu) -> None:
    """Residents give way to gradients and to what autograd keeps, which no plan includes."""
    model = gains(LAYERS).requires_grad_(True)
    x = inputs(gpu, 2)[0]
    moved = testing.moved(model, gpu.device)
    moved(x).square().mean().backward()
    expected = {name: p.grad.cpu() for name, p in moved.named_parameters()}
    del moved
    gc.collect()
    with gpu.room_for(LAYERS * LAYER + LAYERS * 32 * MIB), gpu.install(model, budget="auto") as handle:
        for _ in range(3):
            model.zero_grad()
            model(x).square().mean().backward()
            testing.assert_bit_equal({name: p.grad for name, p in model.named_parameters()}, expected)
        assert handle.stats().bytes_moved > LAYERS * LAYER


class Wider(nn.Module):
    """A layer whose activations are larger than its weight, and no multiple of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:WIDTH] *= self.weight
        return y


def test_residents_are_not_cut_out_of_what_activations_want_again(gpu: Gpu) -> None:
    """Residents do not take memory that activations need again.

    Otherwise each plan would be followed by calls that find enough memory only in pieces.
    """
    model = nn.Sequential(*(Wider() for _ in range(LAYERS))).requires_grad_(False)
    x = torch.rand(7 * MIB, device=gpu.device)  # 28 MiB
    (expected,) = answers(gpu, model, x)
    with gpu.room_for(LAYERS // 2 * LAYER + 8 * 28 * MIB), gpu.install(model, budget="auto") as handle:
        for _ in range(6):  # measured, and planned for
            assert torch.equal(run(model, x), expected)
        before = handle.stats()
        for _ in range(4):
            assert torch.equal(run(model, x), expected)
        after = handle.stats()
        assert after.given_way == before.given_way and after.resident_groups >= LAYERS // 2
