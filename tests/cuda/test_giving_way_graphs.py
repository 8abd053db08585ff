"""CUDA graphs with an automatic budget: weights that a graph has captured neither give way nor move."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import dynswap_ext
import pretend_cuda
from gpu_under_test import CAPPED_LAYER as LAYER
from gpu_under_test import CAPPED_WIDTH as WIDTH
from gpu_under_test import cap, layers, only_pretended_cuda

pytestmark = [only_pretended_cuda, pytest.mark.usefixtures("gives_way")]

DEVICE = "cuda:0"
LAYERS = 12


def spike(layer_count: int) -> None:
    """Allocate the bytes of that many layers at once, and write there."""
    block = torch.empty(layer_count * LAYER, dtype=torch.uint8, device=DEVICE)
    block.fill_(0xFF)
    torch.cuda.synchronize()
    del block
    torch.cuda.empty_cache()


def settle(model: nn.Module, x: torch.Tensor) -> None:
    """Call the model until its automatic plan is made, and wait for the device."""
    for _ in range(2):
        model(x.to(DEVICE))
    torch.cuda.synchronize()


def beside(work: Callable[[], object]) -> None:
    """Run `work` on another thread, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("held", ["nothing", "a weight"])
def test_what_a_graph_has_captured_does_not_give_way(held: str) -> None:
    plain, model, x = layers(LAYERS), layers(LAYERS), torch.randn(4, WIDTH)
    cap(30 * LAYER)
    graph, part = torch.cuda.CUDAGraph(), model[:4]
    with torch.no_grad(), dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        for _ in range(2):
            assert torch.equal(model(x.to(DEVICE)).cpu(), plain(x))
        torch.cuda.synchronize()
        static = x.to(DEVICE)
        # A tensor that the program holds while the graph captures it, and drops later.
        kept = [part[0].weight] if held == "a weight" else []
        with torch.cuda.graph(graph):
            halfway = part(static)
        kept.clear()
        assert handle.stats().resident_groups == LAYERS
        spike(24)  # 18 are free
        assert handle.stats().given_way == LAYERS - 4
        for each in (x, x + 1):
            static.copy_(each)
            graph.replay()
            assert torch.equal(halfway.cpu(), plain[:4](each))
    assert pretend_cuda.violations() == []


def test_nothing_gives_way_to_a_graphs_own_memory() -> None:
    """No resident gives way to a graph's pool: blocks that the pool gets would stay the graph's."""
    plain, model, x = layers(LAYERS), layers(LAYERS), torch.randn(4, WIDTH)
    cap(30 * LAYER)
    with torch.no_grad(), dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        settle(model, x)
        static = x.to(DEVICE)
        with pytest.raises(torch.OutOfMemoryError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model[:4](static)
            torch.empty(24 * LAYER, dtype=torch.uint8, device=DEVICE)
        assert handle.stats().given_way == 0
        assert torch.equal(model(x.to(DEVICE)).cpu(), plain(x))


def test_another_thread_allocates_during_a_capture() -> None:
    """Residents lend memory to another thread during a capture, and take it back, with legal calls only."""
    plain, model, x = layers(LAYERS), layers(LAYERS), torch.randn(4, WIDTH)
    cap(40 * LAYER)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        settle(model, x)
        static = x.to(DEVICE)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            halfway = model[:4](static)
            beside(lambda: torch.empty(8 * LAYER, dtype=torch.uint8, device=DEVICE))
            whole = model[4:](halfway)
        assert handle.stats().given_way == 0
        for each in (x, x + 1):
            static.copy_(each)
            graph.replay()
            assert torch.equal(whole.cpu(), plain(each))
    assert pretend_cuda.violations() == []


def test_memory_that_runs_short_during_a_capture_ends_the_allocation_alone() -> None:
    """An allocation that fails during a capture ends nothing else.

    During a capture, torch frees nothing of its cache, so what residents lend is not enough.
    """
    plain, model, x = layers(LAYERS), layers(LAYERS), torch.randn(4, WIDTH)
    cap(30 * LAYER)
    with torch.no_grad(), dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        settle(model, x)
        capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed")
        with capture, pytest.raises(torch.OutOfMemoryError):
            beside(lambda: torch.empty(24 * LAYER, dtype=torch.uint8, device=DEVICE))
        assert torch.equal(model(x.to(DEVICE)).cpu(), plain(x))
        spike(24)
        assert handle.stats().given_way > 0
        assert torch.equal(model(x.to(DEVICE)).cpu(), plain(x))


def test_no_automatic_plan_ends_a_graph() -> None:
    """After a capture, only `retune` makes a plan: an automatic one would move captured weights."""
    model, x = layers(LAYERS), torch.randn(4, WIDTH).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(6):
                model(x)
        assert handle.tuning is None
        handle.retune("auto")
        with pytest.warns(dynswap_ext.DynswapWarning, match="capture them again"):
            for _ in range(6):
                model(x)
        assert handle.tuning is not None
