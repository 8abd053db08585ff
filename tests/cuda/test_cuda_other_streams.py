"""A handed-out tensor is used, written or freed on other streams than the one that it was handed out on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

RING = 3 * 2 * LAYER_BYTES
DELAY = 20.0  # milliseconds


@pytest.mark.parametrize(
    "part", [lambda w: w, lambda w: w.t()[3:], lambda w: w.detach()], ids=["it", "view", "alias"]
)
def test_record_stream_is_a_use(gpu: Gpu, part: Callable[[Tensor], Tensor]) -> None:
    """After `record_stream`, work that is queued on that stream is done before the bytes are overwritten."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=RING)
    x, other = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        expected, passes = part(moved.layers[0].weight).sum(0), [moved(x)] * 2
        gpu.synchronise()
        weight = model.layers[0].weight
        with gpu.on(other):
            gpu.wait_for_default(other)
            gpu.delay(DELAY)
            here = part(weight).sum(0)
        gpu.record_stream(part(weight), other)
        del weight
        outputs = [model(x) for _ in range(2)]  # uses all slots of the ring, twice
    gpu.synchronise()
    testing.assert_bit_equal(here, expected)
    testing.assert_bit_equal(outputs, passes)
    assert handle.stats().overflow_bytes == 0


def test_record_stream_of_other_tensors(gpu: Gpu) -> None:
    """torch's own memory is still kept for the streams that it is recorded on."""
    gpu.pair(Exact().eval(), budget=RING)
    other = gpu.new_stream()
    x = torch.ones(1 << 20, device=gpu.device)
    with gpu.on(other):
        gpu.wait_for_default(other)
        gpu.delay(DELAY)
        y = x + 1
    x.record_stream(other)
    del x
    filled = [torch.zeros(1 << 20, device=gpu.device) for _ in range(3)]
    gpu.synchronise()
    testing.assert_bit_equal(y, torch.full_like(y, 2))
    assert not any(each.any() for each in filled)


@pytest.mark.parametrize("way", ["another stream", "another thread", "flush"])
@pytest.mark.parametrize("budget", [RING, "1GiB"], ids=["streamed", "resident"])
def test_what_was_written_on_a_stream_that_is_late(gpu: Gpu, way: str, budget: int | str) -> None:
    """A write reaches the master after it was made, on whatever stream its tensor is freed."""
    model = Exact().eval()
    gpu.pair(model, budget=budget)
    x, writer = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        model(x)
        expected = model.get_parameter("layers.0.weight").detach().double() + 1
        gpu.synchronise()
        with gpu.on(writer):
            held = [model.layers[0].weight]
            gpu.delay(DELAY)
            held[0].add_(1)
        if way == "another stream":
            with gpu.on(gpu.new_stream()):
                held.clear()
        elif way == "another thread":
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        master = model.state_dict()["layers.0.weight"]
        testing.assert_bit_equal(master.double(), expected.to(master.dtype).double())
        held.clear()
        testing.assert_bit_equal(model.layers[0].weight.detach().cpu(), expected)


def test_statistics_that_are_updated_on_streams_of_their_own(gpu: Gpu) -> None:
    """Statistics equal those of the moved model if each pass is on a stream that follows the last one."""
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64)).double().train()
    moved, _ = gpu.pair(model)
    x, last = gpu.whole_numbers(width=64), None
    with torch.no_grad():
        for _ in range(3):
            moved(x)
            stream = gpu.new_stream()
            with gpu.on(stream):
                if last is not None:
                    gpu.follow(last)
                gpu.delay(DELAY)
                model(x)
            last = stream
    gpu.synchronise()
    for name, buffer in moved.named_buffers():
        mine = model.state_dict()[name]
        testing.assert_bit_equal(mine, buffer.cpu(), name)


def test_consumers_on_several_streams_in_the_steady_state(gpu: Gpu) -> None:
    """Late consumers on several streams share a ring of pinned masters: right bits, no wait of the host."""
    if not gpu.native:
        pytest.skip("pure Python copies pageable memory, for which torch waits")
    model = Exact().eval()
    gpu.pin(model)
    moved, handle = gpu.pair(model, budget=RING)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(3)]
    streams = [gpu.new_stream() for _ in inputs]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        for _ in range(2):
            for x, stream in zip(inputs, streams, strict=True):
                with gpu.on(stream):
                    model(x)
        gpu.synchronise()
        before = handle.stats()
        outputs: list[list[Tensor]] = [[], [], []]
        with gpu.silent():
            for number in range(3):
                for x, stream, kept in zip(inputs, streams, outputs, strict=True):
                    with gpu.on(stream):
                        gpu.delay(DELAY / (1 + number))
                        kept.append(model(x))
        after = handle.stats()
    gpu.synchronise()
    for kept, wanted in zip(outputs, expected, strict=True):
        testing.assert_bit_equal(kept, [wanted] * 3)
    assert after.host_synchronisations == before.host_synchronisations
    assert after.bytes_moved - before.bytes_moved >= 9 * (LAYERS - 3) * LAYER_BYTES
