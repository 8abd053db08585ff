"""`Handle.release` frees all device memory, and `resume`, or the next call, takes it again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from dynswap_ext import testing
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext.errors import BudgetError, ConfigError, OutOfMemoryError
from gpu_under_test import LAYER_BYTES, LAYERS, WIDTH, Exact, Gpu, cap
from threads import repeated

BUDGETS = pytest.mark.parametrize("budget", ["minimum", 3 * LAYER_BYTES, "1GiB"], ids=["min", "some", "all"])


def held(gpu: Gpu) -> tuple[int, int]:
    """Return the bytes that are allocated, and those that torch's allocator has from the driver."""
    module: Any = torch.get_device_module(gpu.device)
    return module.memory_allocated(gpu.device), module.memory_reserved(gpu.device)


@BUDGETS
def test_every_byte_comes_back(gpu: Gpu, budget: Any) -> None:
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    DeviceMemory(gpu.device).empty_cache()
    before = held(gpu)
    with gpu.install(model, budget=budget) as handle, torch.no_grad():
        expected = model(x).cpu()
        assert held(gpu)[0] > before[0] or not gpu.native
        # Pure Python keeps one element of each dtype that it has connected to a graph.
        rest = 0 if gpu.native else 512
        for _ in range(2):
            handle.release()
            assert held(gpu) <= (before[0] + rest, before[1] + rest)
        copies = handle.stats().copies
        handle.resume()
        if budget == "1GiB":
            assert handle.stats().copies == copies + LAYERS  # they are on their way, and nobody has asked
            assert held(gpu)[0] >= LAYERS * LAYER_BYTES
        assert torch.equal(model(x).cpu(), expected)
        if budget == "1GiB":
            assert handle.stats().copies == copies + LAYERS


@BUDGETS
def test_a_call_takes_it_again(gpu: Gpu, budget: Any) -> None:
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    handle = gpu.install(model, budget=budget)
    with torch.no_grad():
        expected = model(x)
        planned = handle.stats()
        handle.release()
        assert "nothing has been used yet" in str(handle.report()) or not gpu.native  # of no plan
        assert torch.equal(model.layers[2].weight.cpu(), model.layers[2]._parameters["weight"])  # without one
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
    again = handle.stats()
    assert (again.arena_bytes, again.resident_groups) == (planned.arena_bytes, planned.resident_groups)


def test_for_the_time_of_a_block(gpu: Gpu) -> None:
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    handle = gpu.install(model, budget="1GiB")
    before = held(gpu)[0] - LAYERS * LAYER_BYTES * gpu.native
    with torch.no_grad():
        expected = model(x)
        with pytest.raises(KeyError), handle.release():
            assert held(gpu)[0] <= before + expected.nbytes + 512
            raise KeyError
        copies = handle.stats().copies
        assert torch.equal(model(x), expected) and handle.stats().copies == copies


def test_what_the_program_holds_and_has_written(gpu: Gpu) -> None:
    """Held tensors keep their bytes after a release. What was written on one is in its master."""
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    handle = gpu.install(model, budget="1GiB")
    with torch.no_grad():
        model(x)
        kept, written = model.layers[0].weight, model.layers[1].weight
        as_it_was = kept.cpu().clone()
        written.add_(1)
        handle.release()
        assert torch.equal(model.layers[1]._parameters["weight"], written.cpu())
        assert torch.equal(kept.cpu(), as_it_was)
        written.add_(1)  # a write on what was handed out before
        handle.resume()
        assert torch.equal(model.layers[1].weight.cpu(), written.cpu())
        model.layers[0]._parameters["weight"].add_(1)  # a write on a master meanwhile
        handle.release()
        model.layers[2]._parameters["weight"].add_(1)
        plain = Exact().requires_grad_(False)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model(x), plain.to(gpu.device)(x))


def test_between_forward_and_backward(gpu: Gpu) -> None:
    model = Exact()
    moved, handle = gpu.pair(model, dtype=None, budget=3 * LAYER_BYTES)
    x = gpu.whole_numbers(dtype=torch.float32)
    model(x).sum().backward()
    moved(x).sum().backward()
    model.zero_grad()
    moved.zero_grad()
    loss, expected = model(x).sum(), moved(x).sum()
    handle.release()
    loss.backward()
    expected.backward()
    for one, other in zip(model.parameters(), moved.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad.cpu())


def test_while_other_threads_call_the_model(gpu: Gpu) -> None:
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    handle = gpu.install(model, budget=3 * LAYER_BYTES)
    with torch.no_grad():
        expected = model(x).cpu()

    def call(_: int) -> None:
        with torch.no_grad():
            assert torch.equal(model(x).cpu(), expected)

    with repeated(call):
        for _ in range(20):
            handle.release()
            handle.resume()


def test_no_longer_installed(gpu: Gpu) -> None:
    model = nn.Linear(8, 8)
    first = gpu.install(model)
    second = gpu.install(model)
    for move in (first.release, first.resume):
        with pytest.raises(ConfigError, match="replaced by a later install, whose handle"):
            move()
    second.uninstall()
    for move in (second.release, second.resume):
        with pytest.raises(ConfigError, match="has been uninstalled, or is gone"):
            move()


def test_what_has_grown_is_given_back_too(gpu: Gpu) -> None:
    """A release frees all memory, also if masters have grown so that the next plan may not fit."""
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    before = held(gpu)[0]
    handle = gpu.install(model, budget=3 * LAYER_BYTES)
    with torch.no_grad():
        model(x)
        model.layers[2].weight = nn.Parameter(torch.zeros(8 * LAYER_BYTES // 4).view(-1, WIDTH))
        handle.release()
        assert held(gpu)[0] <= before + 512 + x.nbytes
        with pytest.raises(BudgetError):
            handle.resume()
        assert model.layers[2].weight.shape == (8 * WIDTH, WIDTH)


def test_the_error_of_a_block_comes_before_that_of_the_budget(gpu: Gpu) -> None:
    model = Exact()
    handle = gpu.install(model, budget=3 * LAYER_BYTES)
    with torch.no_grad(), pytest.raises(KeyError), handle.release():
        model.layers[2].weight = nn.Parameter(torch.zeros(8 * LAYER_BYTES // 4).view(-1, WIDTH))
        raise KeyError


def test_memory_that_is_anothers_by_now(gpu: Gpu) -> None:
    """If the memory is taken meanwhile, a call with a fixed budget fails; "auto" takes what there is."""
    if gpu.device.type != "cuda" or not gpu.native:
        pytest.skip("the memory of a CUDA device is limited, and pure Python plans none")
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    expected = testing.moved(model, gpu.device, None)(x)
    for budget, works in ((6 * LAYER_BYTES, False), ("auto", True)):
        handle = gpu.install(model, budget=budget)
        with torch.no_grad():
            model(x)
            handle.release()
            cap(4 * LAYER_BYTES + (1 << 20))
            with nullcontext() if works else pytest.raises(OutOfMemoryError):
                handle.resume()
            with nullcontext() if works else pytest.warns(match="given back cannot be taken again: .*copies"):
                assert torch.equal(model(x), expected)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(model(x), expected)
        handle.uninstall()


def test_resume_without_a_release_moves_nothing(gpu: Gpu) -> None:
    model, x = Exact(), gpu.whole_numbers(dtype=torch.float32)
    handle = gpu.install(model, budget="1GiB")
    with torch.no_grad(), handle.release():
        model(x)  # takes it again
        copies = handle.stats().copies
    with torch.no_grad():
        handle.resume()
        model(x)
    assert handle.stats().copies == copies


def test_a_block_that_ends_the_install(gpu: Gpu) -> None:
    model = nn.Linear(8, 8)
    handle = gpu.install(model)
    with handle.release():
        handle.uninstall()
    assert not handle.active
