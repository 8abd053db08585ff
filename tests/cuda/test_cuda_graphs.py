"""Capture of a CUDA graph: residents are captured and right, a streamed weight is refused, nothing breaks."""

from __future__ import annotations

import pytest
import torch

from dynswap_ext import DeviceError, testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu


def only_native(gpu: Gpu) -> None:
    gpu.needs_real("CUDA graphs")
    if not gpu.native:
        pytest.skip("pure Python copies pageable memory, which no capture takes")


def test_a_streamed_weight_is_refused(gpu: Gpu) -> None:
    only_native(gpu)
    model = Exact().eval()
    moved, _ = gpu.pair(model, budget=3 * 2 * LAYER_BYTES)
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
        with gpu.on(side):  # as torch's manual has it: warm-up on a stream beside
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
