"""Several threads use one installed model, or several models, at once."""

from __future__ import annotations

import gc
import re
import threading
import warnings

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import BudgetError, testing
from sample_experts import WIDTH, Mixture
from sample_models import mlp
from threads import THREADS, in_threads, repeated

PASSES = 25


@pytest.mark.filterwarnings("ignore:the budget of:dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("budget", [None, "12MB"], ids=["streamed", "budget"])
def test_threads_share_a_model(provider: Provider, budget: str | None) -> None:
    model = mlp(features=768, layers=4).eval()  # 4.7 MB a layer in float64: each is a group of its own
    moved, handle = provider.pair(model, budget=budget)
    inputs = [provider.randn(3, 768, seed=i) for i in range(THREADS)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(PASSES):
                testing.assert_bit_equal(model(inputs[index]), expected[index], f"output of thread {index}")

    in_threads(work)
    assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_threads_share_a_strict_budget(provider: Provider, dtype: torch.dtype, layers: int) -> None:
    model = mlp(features=768, layers=6).eval()
    layer = (768 * 768 + 768) * dtype.itemsize
    moved, handle = provider.pair(model, dtype, budget=layers * layer + 6 * 4096, strict_budget=True)
    x = provider.randn(3, 768, dtype=dtype)
    with torch.no_grad():
        expected = moved(x)

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(PASSES):
                testing.assert_bit_equal(model(x), expected)

    in_threads(work, count=2)  # the budget has room for a layer of each thread
    assert handle.stats().overflow_bytes == 0


class Held(nn.Module):
    """A layer whose call waits until each thread holds a layer."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))
        self._together = together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        self._together.wait(timeout=60)
        return x @ weight


class OneOf(nn.Module):
    """Layers of which each call uses one."""

    def __init__(self, layers: int, together: threading.Barrier) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Held(together) for _ in range(layers))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.layers[which](x)
        return out


@pytest.mark.parametrize("strict", [False, True])
def test_more_threads_than_groups_have_room(provider: Provider, strict: bool) -> None:
    """The warning or error gives the number of threads and a remedy, which works."""
    model = OneOf(12, threading.Barrier(THREADS))
    layer = 512 * 512 * 8
    budget = 3 * layer + 12 * 4096
    x = provider.randn(2, 512)
    refused: list[str] = []

    def work(index: int) -> None:
        try:
            with torch.no_grad():
                model(x, 3 * index)
        except BudgetError as error:
            refused.append(str(error))
            model.layers[0]._together.abort()
        except threading.BrokenBarrierError:
            pass

    handle = provider.install(model, dtype=torch.float64, budget=budget, strict_budget=strict)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        in_threads(work)
    (said,) = refused or [str(warning.message) for warning in shown]
    assert bool(refused) == strict
    if provider.native:
        assert said.startswith(f"{THREADS} threads call the model at the same time")
        assert f"give a prefetch of {THREADS} or more, and a budget of" in said
    else:
        assert f"kept alive (by {THREADS} threads at the same time)" in said
    enough = re.search(r"(?:and|with) a budget of [^(]*\((\d+) bytes\)", said)
    assert enough is not None
    handle.uninstall()

    model = OneOf(12, threading.Barrier(THREADS))
    handle = provider.install(
        model, dtype=torch.float64, strict_budget=True, budget=int(enough[1]), prefetch=THREADS
    )
    refused.clear()
    in_threads(work)
    assert not refused
    assert handle.stats().overflow_bytes == 0


def test_threads_train_on_one_model(provider: Provider) -> None:
    model = mlp(layers=3)
    moved, _ = provider.pair(model)
    inputs = [provider.randn(3, 16, seed=i) for i in range(THREADS)]
    for _ in range(5):
        for x in inputs:
            moved(x).sum().backward()

    def work(index: int) -> None:
        for _ in range(5):
            model(inputs[index]).sum().backward()

    in_threads(work)
    for (name, p), q in zip(model.named_parameters(), moved.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad.float().cpu(), rtol=1e-4, atol=1e-4, msg=name)


def test_experts_are_read_while_the_model_is_installed_again(provider: Provider) -> None:
    """Experts can be read while a new install ends the one that served their slices."""
    model = Mixture(layers=1)
    moved, _ = provider.pair(model)
    x = provider.randn(2, WIDTH)
    chosen = torch.tensor([[[0, 1], [2, 3]]], device=provider.device)
    expected = moved(x, chosen).detach()

    def work(_: int) -> None:
        output = model(x, chosen)
        output.sum().backward()
        testing.assert_bit_equal(output.detach(), expected)

    with repeated(work, count=3):
        for _ in range(PASSES):
            provider.install(model, dtype=torch.float64)


def test_counts_are_not_lost(provider: Provider) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(THREADS))

    model = Counter()
    provider.pair(model)

    def work(index: int) -> None:
        for _ in range(PASSES):
            with lock:
                model.count[index] += 1

    lock = threading.Lock()
    in_threads(work)
    gc.collect()
    assert model.state_dict()["count"].tolist() == [PASSES] * THREADS


def test_installs_in_threads(provider: Provider) -> None:
    models = [mlp() for _ in range(THREADS)]

    def work(index: int) -> None:
        x = provider.randn(2, 16, seed=index)
        moved = testing.moved(models[index], provider.device, torch.float64)
        for _ in range(5):
            with provider.install(models[index], dtype=torch.float64):
                testing.assert_bit_equal(models[index](x), moved(x))

    in_threads(work)
    assert all(type(module) is nn.Linear for model in models for module in (model[0], model[2]))
