"""Capture of a CUDA graph: residents are captured, a streamed weight is refused, and later calls work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from conftest import only_cuda_has
from dynswap_ext import DeviceError, DynswapWarning, testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

RING = 3 * 2 * LAYER_BYTES
DELAY = 20.0  # milliseconds


@pytest.fixture(autouse=True)
def _cuda() -> None:
    only_cuda_has("graphs")


def only_native(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("pure Python copies pageable memory, which no capture takes")


@contextmanager
def captured_on(gpu: Gpu, stream: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture a graph on a stream, without the wait for the device that torch.cuda.graph() begins with."""
    graph = torch.cuda.CUDAGraph()
    with gpu.on(stream):
        graph.capture_begin()
        try:
            yield graph
        finally:
            graph.capture_end()


def test_a_streamed_weight_is_refused(gpu: Gpu) -> None:
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=RING)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        model(x)
        gpu.synchronise()
        with pytest.raises(DeviceError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
        gpu.synchronise()
        for _ in range(2):
            testing.assert_bit_equal(model(x), expected, "after the refusal")


@pytest.mark.parametrize("stream", ["warmed up", "the capture's own"])
def test_residents_are_captured(gpu: Gpu, stream: str) -> None:
    only_native(gpu)
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget="1GiB")
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(3)]
    x = inputs[0].clone()
    graph, side = torch.cuda.CUDAGraph(), gpu.new_stream()
    with torch.no_grad():
        expected = [moved(each) for each in inputs]
        with gpu.on(side):  # warm-up on a side stream, as in torch's manual
            for _ in range(3):
                model(x)
        gpu.synchronise()
        with torch.cuda.graph(graph, stream=side if stream == "warmed up" else None):
            output = model(x)
        for each, wanted in zip(inputs, expected, strict=True):
            x.copy_(each)
            graph.replay()
            gpu.synchronise()
            testing.assert_bit_equal(output, wanted)
        testing.assert_bit_equal(model(inputs[1]), expected[1], "beside the graph")
    assert handle.stats().resident_bytes == handle.stats().weight_bytes


def test_residents_on_their_way_are_captured(gpu: Gpu) -> None:
    """Residents are captured while their copies are queued, for which a capture cannot wait."""
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget="1GiB")
    x, side = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        expected = moved(x)
        gpu.synchronise()
        gpu.congest()
        for layer in model.layers:
            assert layer.weight is not None
        with captured_on(gpu, side) as graph:
            output = model(x)
        graph.replay()
        gpu.synchronise()
        testing.assert_bit_equal(output, expected)


def test_a_model_that_streams_while_a_graph_is_captured(gpu: Gpu) -> None:
    """A model streams on one thread while another captures a graph.

    A capture forbids all threads to call what could synchronise, such as queries of events. It also forbids
    cudaMalloc, so other threads and streams have their memory and their cuBLAS before.
    """
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=RING)
    x, other = gpu.whole_numbers(), gpu.new_stream()
    warm, captures = threading.Event(), threading.Event()
    outputs: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad(), gpu.on(other):
            warm_up = [model(x) for _ in range(3)]
            gpu.synchronise()
            del warm_up
            warm.set()
            captures.wait()
            outputs.extend(model(x) for _ in range(3))

    with torch.no_grad():
        expected = moved(x)
        for _ in range(2):
            model(x)
        gpu.synchronise()
        thread = threading.Thread(target=run)
        thread.start()
        warm.wait()
        with captured_on(gpu, gpu.new_stream()) as graph:
            twice = 2 * x
            captures.set()
            thread.join()
        graph.replay()
    gpu.synchronise()
    testing.assert_bit_equal(twice, 2 * x)
    testing.assert_bit_equal(outputs, [expected] * 3)


def test_a_tensor_that_dies_inside_a_capture(gpu: Gpu) -> None:
    """A tensor may be freed during a capture, though no event can be recorded on the captured stream."""
    only_native(gpu)
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=RING)
    x, side, other = gpu.whole_numbers(), gpu.new_stream(), gpu.new_stream()
    with torch.no_grad():
        expected, passes = moved.layers[0](x), [moved(x)] * 3
        for stream in (side, other):  # cudaMalloc is forbidden during a capture
            gpu.synchronise()
            with gpu.on(stream):
                warm_up = [moved(x) for _ in range(3)]
            del warm_up
        gpu.synchronise()
        with gpu.on(side):
            weight = model.layers[0].weight
            gpu.delay(DELAY)
            y = torch.nn.functional.linear(x, weight)
        with captured_on(gpu, side) as graph:
            twice = 2 * x
            del weight
            with gpu.on(other):
                outputs = [model(x)]  # uses all slots of the ring but one
        outputs += [model(x) for _ in range(2)]
        graph.replay()
    gpu.synchronise()
    testing.assert_bit_equal(y, expected)
    testing.assert_bit_equal(twice, 2 * x)
    testing.assert_bit_equal(outputs, passes)
    assert handle.stats().overflow_bytes == 0
    before = handle.stats()
    with torch.no_grad():
        model(x)
    assert handle.stats().bytes_moved - before.bytes_moved <= LAYERS * LAYER_BYTES
    testing.assert_nothing_held(handle)


def test_masters_that_change_under_a_graph(gpu: Gpu) -> None:
    """A queued replay reads the old weights, on any stream; later replays read the new ones."""
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget="1GiB")
    x, side = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        old = moved(x)
        with gpu.on(side):
            model(x)
        gpu.synchronise()
        with captured_on(gpu, side) as graph:
            output = model(x)
        for p in model.parameters():
            p.neg_().add_(1)
        new = testing.moved(model, gpu.device, torch.float64)(x)
        gpu.synchronise()
        gpu.delay(DELAY)
        graph.replay()
        first = output.clone()
        eager = model(x)
        graph.replay()
    gpu.synchronise()
    testing.assert_bit_equal([first, eager, output], [old, new, new])


def test_a_new_plan_ends_a_graph_aloud(gpu: Gpu) -> None:
    only_native(gpu)
    model = Exact().eval()
    _, handle = gpu.pair(model, budget="1GiB")
    x, side = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        with gpu.on(side):
            model(x)
        gpu.synchronise()
        with captured_on(gpu, side):
            model(x)
        handle.retune()
        with pytest.warns(DynswapWarning, match="capture them again"):
            for _ in range(5):
                model(x)


def test_a_norm_that_trains_is_refused_for_what_it_is(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("pure Python writes statistics back as they die, which a capture refuses by itself")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    gpu.install(model, budget="1GiB")
    x = torch.ones(4, 8, device=gpu.device)
    with torch.no_grad():
        for _ in range(2):
            model(x)
        gpu.synchronise()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(DeviceError, match=r"'1\..*call eval\(\)"), torch.cuda.graph(graph):
            model(x)
        model.eval()(x)
        gpu.synchronise()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)


def test_nothing_is_planned_inside_a_capture(gpu: Gpu) -> None:
    """A new plan waits until a capture is over, as its memory would belong to the graph."""
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget="1GiB")
    x, side = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        with gpu.on(side):
            model(x)
        gpu.synchronise()
        model.extra = torch.nn.Linear(8, 8)
        with captured_on(gpu, side) as graph:
            output = model(x)
        graph.replay()
        gpu.synchronise()
        testing.assert_bit_equal(output, moved(x))


def test_what_was_written_reaches_masters_after_the_capture(gpu: Gpu) -> None:
    """Writes that cannot be copied to the host during a capture reach their masters after it."""
    only_native(gpu)
    model = Exact().eval()
    gpu.pair(model, budget="1GiB")
    x, side = gpu.whole_numbers(), gpu.new_stream()
    with torch.no_grad():
        with gpu.on(side):
            model(x)
            model.layers[0].weight.add_(1)
        with captured_on(gpu, side) as graph:
            output = model(x)
        graph.replay()
        gpu.synchronise()
        written = model.layers[0].weight.detach().cpu()
        master = model.state_dict()["layers.0.weight"]
    testing.assert_bit_equal(master.double(), written)
    assert output.shape == x.shape


class WritesItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.factor != 1:
            self.weight.data.mul_(self.factor)  # bumps no version
        return x @ self.weight


def test_what_was_written_unnoticed_before_a_capture_comes_home_after_it(gpu: Gpu) -> None:
    only_native(gpu)
    model = WritesItsWeight().eval()
    gpu.install(model, dtype=torch.float64, budget="1GiB")
    x, side = torch.ones(2, 8, dtype=torch.float64, device=gpu.device), gpu.new_stream()
    with torch.no_grad(), gpu.on(side):
        model(x)
        for factor in (3, 5):  # the second time the session knows of captures
            model.factor = factor
            model(x)
            model.factor = 1
            with captured_on(gpu, side):
                model(x)
            gpu.synchronise()
            assert model.state_dict()["weight"][0, 0] == model(x)[0, 0].item() / 8
    assert model.state_dict()["weight"][0, 0] == 15
