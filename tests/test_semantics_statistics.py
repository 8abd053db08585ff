"""Running statistics, which batch norm writes without a new version, are in the masters after a call."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pretend_cuda
from conftest import Provider
from dynswap_ext import testing

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])


def norms(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6))))


def assert_masters_as_moved(masters: dict[str, torch.Tensor], moved: nn.Module) -> None:
    for name, buffer in moved.named_buffers():
        testing.assert_bit_equal(masters[name], buffer.to("cpu", masters[name].dtype), name)


@BUDGETS
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "cast"])
@pytest.mark.parametrize("graph", [False, True], ids=["no graph", "graph"])
def test_whoever_holds_a_master_sees_them(
    provider: Provider, graph: bool, dtype: torch.dtype | None, budget: str | None
) -> None:
    """Code that holds a master sees the statistics, whether masters are cast or handed out themselves."""
    model = norms()
    masters = dict(model.named_buffers())
    moved, _ = provider.pair(model, dtype, budget=budget)
    kept = []
    for step in range(3 if dtype is None else 1):  # cast, the second step starts from rounded statistics
        x = provider.randn(5, 6, dtype=dtype or torch.float32, seed=step)
        with torch.set_grad_enabled(graph):
            kept.append([m(x).square().sum() for m in (model, moved)])
        assert_masters_as_moved(masters, moved)
    kept.clear()
    model.state_dict()
    assert_masters_as_moved(masters, moved)


@BUDGETS
def test_a_norm_that_is_used_twice_in_a_call(provider: Provider, budget: str | None) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = self.norm.running_mean.clone()
            y = self.norm(self.norm(x) * 2 + 1)
            return y + mean + self.norm.running_mean.clone()

    model = Twice()
    moved, _ = provider.pair(model, None, budget=budget)
    for step in range(3):
        x = provider.randn(5, 6, dtype=torch.float32, seed=step)
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert_masters_as_moved(model.state_dict(), moved)


@BUDGETS
def test_evaluation_while_a_graph_of_training_lives(provider: Provider, budget: str | None) -> None:
    model = norms()
    moved, _ = provider.pair(model, None, budget=budget)
    x = provider.randn(5, 6, dtype=torch.float32)
    losses = []
    for _ in range(2):
        losses.append([m.train()(x).square().sum() for m in (model, moved)])
        with torch.no_grad():
            testing.assert_bit_equal(model.eval()(x), moved.eval()(x), "in eval")
    assert_masters_as_moved(model.state_dict(), moved)
    for found, expected in losses:
        found.backward()
        expected.backward()
    with torch.no_grad():
        testing.assert_bit_equal(model.eval()(x), moved.eval()(x), "in eval, afterwards")


def test_a_forward_that_is_computed_again_in_backward(provider: Provider) -> None:
    model = norms()
    moved, _ = provider.pair(model, None)
    for m in (model, moved):
        x = provider.randn(5, 6, dtype=torch.float32).requires_grad_()
        checkpoint(m, x, use_reentrant=False).square().sum().backward()
    assert_masters_as_moved(model.state_dict(), moved)


def test_a_master_that_is_set_in_the_same_call(provider: Provider) -> None:
    class Reset(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            with torch.no_grad():
                self._buffers["running_mean"].fill_(3.0)  # a write to the master, which is kept
            return y + self.running_mean

    model = Reset(6)
    moved, _ = provider.pair(model, None)
    x = provider.randn(5, 6, dtype=torch.float32)
    testing.assert_bit_equal(model(x), moved(x), "output")
    assert model.state_dict()["running_mean"].unique().tolist() == [3.0]


def test_a_call_that_fails_keeps_what_it_wrote(provider: Provider) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x)
            raise ValueError("on purpose")

    model = Fails()
    moved, _ = provider.pair(model, None)
    for m in (model, moved):
        with pytest.raises(ValueError, match="on purpose"):
            m(provider.randn(5, 6, dtype=torch.float32))
    gc.collect()
    assert_masters_as_moved(model.state_dict(), moved)


@pytest.mark.skipif(not pretend_cuda.active(), reason="only the pretend device counts synchronisations")
@pytest.mark.parametrize("graph", [False, True], ids=["no graph", "graph"])
def test_no_wait_for_each_buffer(provider: Provider, graph: bool) -> None:
    if not provider.native:
        pytest.skip("pure Python waits for whatever it copies")

    def waits(layers: int) -> int:
        model = norms(layers)
        provider.install(model, budget="1GiB")
        x = provider.randn(5, 6, dtype=torch.float32)
        counts = []
        with torch.set_grad_enabled(graph):
            for _ in range(3):
                provider.device_module.synchronize()
                before = pretend_cuda.counts()["synchronisations"]
                loss = model(x).square().sum()
                counts.append(pretend_cuda.counts()["synchronisations"] - before)
                if graph:
                    del loss
        return counts[-1]

    few, many = waits(1), waits(8)
    assert many == few


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "resident"])
def test_a_strict_budget_holds_between_training_and_evaluation(provider: Provider, whole: bool) -> None:
    """A strict budget holds if statistics, trained and frozen weights share a group.

    One of them is read first, before the others are known to have changed.
    """
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))))
    model.double()[0].weight.requires_grad_(False)
    size = 4 * sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    handle = provider.install(
        model, dtype=torch.float32, budget=2 * size if whole else size // 2 + 32768, strict_budget=True
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x = provider.randn(8, 64, dtype=torch.float32)
    for _ in range(4):
        model.train()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            testing.assert_bit_equal(model(x), testing.moved(model, provider.device, torch.float32)(x))
            for p in model.parameters():
                p.mul_(0.9)
            testing.assert_bit_equal(model(x), testing.moved(model, provider.device, torch.float32)(x))
    assert handle.stats().overflow_bytes == 0
