"""Buffers that a graph of torch.compile writes, in training or not: the masters and later calls see it."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
from conftest import Provider, needs_inductor
from dynswap_ext import testing

budgets = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Writing(nn.Module):
    """Writes a cache and counters, whose values are exact in both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("large", torch.zeros(600, 600))  # too large to be compared after each call
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("read", torch.arange(4.0))

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.count.add_(1)
        self.calls += 1
        self.cache[:, step] = x[0].detach()
        with torch.no_grad():
            self.large[300, 300 + step].add_(2)
        return x + self.cache.sum(1) + self.calls + self.count + self.read + self.large.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.writing = Writing()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.norm(self.linear(self.writing(x, step)))  # type: ignore[no-any-return]


def assert_same_buffers(model: nn.Module, moved: nn.Module, what: str) -> None:
    for (name, found), expected in zip(model.named_buffers(), moved.buffers(), strict=True):
        wanted = expected.to(found.device, found.dtype)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, msg=f"{name} {what}")


def check(
    provider: Provider, make: type[nn.Module], backend: str, training: bool, budget: str | None
) -> None:
    model = make().train(training)
    moved, handle = provider.pair(model, budget=budget)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for step in range(4):
        x = torch.arange(12.0).reshape(3, 4).to(provider.device, torch.float64)
        with torch.set_grad_enabled(step % 2 == 1):
            found, expected = compiled(x, step), moved(x, step)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"output of step {step}")
        if step > 1:  # until then nothing but the next call looks at the buffers
            assert_same_buffers(model, moved, f"after step {step}")
        del found
    with torch.no_grad():
        x = torch.ones(3, 4, device=provider.device, dtype=torch.float64)
        found, expected = model(x, 5), moved(x, 5)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg="output of an eager call")
        compiled(x, 6), moved(x, 6)
    dynswap_ext.uninstall(model)
    assert_same_buffers(model, moved, "after the uninstall")
    testing.assert_nothing_held(handle)


@budgets
@modes
@pytest.mark.parametrize(
    ("make", "backend"), [(Writing, "eager"), pytest.param(Net, "aot_eager", marks=pytest.mark.nightly)]
)
def test_what_a_graph_writes_reaches_the_masters(
    provider: Provider, make: type[nn.Module], backend: str, training: bool, budget: str | None
) -> None:
    check(provider, make, backend, training, budget)


@modes
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor(provider: Provider, training: bool) -> None:
    needs_inductor(provider)
    check(provider, Net, "inductor", training, None)


@budgets
def test_a_change_of_mode_between_calls(provider: Provider, budget: str | None) -> None:
    model = Net()
    moved, _ = provider.pair(model, budget=budget)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.arange(12.0).reshape(3, 4).to(provider.device, torch.float64)
    for step, training in enumerate((True, False, True, False)):
        for each in (model, moved):
            each.train(training)
        with torch.no_grad():
            found, expected = compiled(x, step), moved(x, step)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"output of step {step}")
    assert_same_buffers(model, moved, "afterwards")


@modes
def test_a_master_that_is_written_between_calls_wins(provider: Provider, training: bool) -> None:
    model = Writing().train(training)
    moved, _ = provider.pair(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, 4, device=provider.device, dtype=torch.float64)
    with torch.no_grad():
        for step in range(3):
            testing.assert_bit_equal(compiled(x, step), moved(x, step), f"output of step {step}")
            for each in (model, moved):
                for buffer in each.buffers():
                    buffer.mul_(2)
            assert_same_buffers(model, moved, f"after step {step}")
