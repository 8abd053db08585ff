"""Several threads with a stream each share an installed model; several models share a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu
from threads import THREADS, at_once, in_threads

PASSES = 5
LAYER = 2 * LAYER_BYTES


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")  # four threads may hold three slots
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("budget", [3 * LAYER, 5 * LAYER], ids=["ring", "some resident"])
def test_threads_share_a_model(gpu: Gpu, budget: int, prefetch: int) -> None:
    if not gpu.native and prefetch:
        pytest.skip("pure Python fetches nothing ahead")
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=budget, prefetch=prefetch)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(THREADS)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
    gpu.synchronise()
    outputs: list[list[torch.Tensor]] = [[] for _ in range(THREADS)]

    def work(index: int) -> None:
        with torch.no_grad(), gpu.on(gpu.new_stream()):
            for number in range(PASSES):
                gpu.delay(2 * ((index + number) % 3))
                outputs[index].append(model(inputs[index]))

    in_threads(work)
    gpu.synchronise()
    for index in range(THREADS):
        testing.assert_bit_equal(outputs[index], [expected[index]] * PASSES, f"outputs of thread {index}")
    assert handle.stats().bytes_moved > 0


def test_threads_with_models_of_their_own(gpu: Gpu) -> None:
    models = [Exact(layers=3).eval() for _ in range(THREADS)]
    pairs = [gpu.pair(model, budget=2 * LAYER) for model in models]
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(THREADS)]
    with torch.no_grad():
        expected = [moved(x) for (moved, _), x in zip(pairs, inputs, strict=True)]
    gpu.synchronise()
    outputs: list[list[torch.Tensor]] = [[] for _ in range(THREADS)]

    def work(index: int) -> None:
        with torch.no_grad(), gpu.on(gpu.new_stream()):
            for _ in range(PASSES):
                outputs[index].append(models[index](inputs[index]))

    in_threads(work)
    gpu.synchronise()
    for index, (_, handle) in enumerate(pairs):
        testing.assert_bit_equal(outputs[index], [expected[index]] * PASSES, f"outputs of thread {index}")
        assert handle.stats().bytes_moved >= 3 * LAYER_BYTES


def test_a_tensor_dies_on_another_thread(gpu: Gpu) -> None:
    """The last owner of a tensor may be a thread that has never used the device."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=3 * LAYER)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
        gpu.synchronise()
        for _ in range(3):
            held = [model.layers[0].weight]
            gpu.delay(5)
            product = torch.nn.functional.linear(x, held[0])
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            testing.assert_bit_equal(model(x), expected)
            testing.assert_bit_equal(product, torch.nn.functional.linear(x, moved.layers[0].weight))
    testing.assert_nothing_held(handle)


class Turns(nn.Module):
    """Calls one batch norm in turns with another thread, each within a call of its own model."""

    def __init__(
        self,
        shared: nn.Module,
        mine: threading.Semaphore,
        next_one: threading.Semaphore,
        at_the_end: Callable[[Callable[[], object]], object],
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__.update(shared=shared, mine=mine, next_one=next_one, at_the_end=at_the_end)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in range(PASSES):
            assert self.mine.acquire(timeout=60)
            self.shared(x)
            if turn == PASSES - 1:
                self.at_the_end(self.next_one.release)
            else:
                self.next_one.release()
        return self.linear(x)


def statistics_after_turns(gpu: Gpu, *, installed: bool, while_it_waits: bool) -> dict[str, torch.Tensor]:
    def at_the_end(release: Callable[[], object]) -> None:
        if not while_it_waits:
            release()
            return
        gpu.delay(300)
        threading.Timer(0.1, release).start()

    torch.manual_seed(0)
    shared, turns = nn.BatchNorm1d(4), [threading.Semaphore(1), threading.Semaphore(0)]
    models = [Turns(shared, turns[index], turns[1 - index], at_the_end) for index in range(2)]
    inputs = [torch.randn(8, 4).to(gpu.device) for _ in models]
    for model in (shared, *models):
        if installed:
            gpu.install(model)
        else:
            model.to(gpu.device)
    at_once(*(partial(model, x) for model, x in zip(models, inputs, strict=True)))
    return {name: value.cpu() for name, value in shared.state_dict().items()}


@pytest.mark.parametrize("while_it_waits", [False, True])
def test_threads_take_turns_with_statistics(gpu: Gpu, while_it_waits: bool) -> None:
    """What one thread's forward wrote is read by another's, before the first's outermost call has ended.

    The last turn is taken while the first thread's call ends, and waits for what it wrote.
    """
    expected = statistics_after_turns(gpu, installed=False, while_it_waits=while_it_waits)
    for name, value in statistics_after_turns(gpu, installed=True, while_it_waits=while_it_waits).items():
        testing.assert_bit_equal(value, expected[name], name)
