"""Small programs whose results once differed from a plain model's. NOT_YET names those that still do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import nn

from coded_masters import code_masters, coded
from conftest import PRETEND, Provider, skip_or_fail
from dynswap_ext import testing
from not_yet import NOT_YET, waits
from sample_models import mlp
from threads import repeated

Test = TypeVar("Test", bound=Callable[..., None])
Mapped = Callable[[nn.Module], nn.Module]


def waiting_for(name: str) -> Callable[[Test], Test]:
    """Return a mark that skips a program as long as NOT_YET has its entry."""
    return pytest.mark.skipif(waits(name), reason=NOT_YET.get(name, ""))


# Writes on masters ------------------------------------------------------------------------------------


def test_what_was_assigned_over_is_freed(provider: Provider) -> None:
    model = mlp(24).eval()
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, 24)
    with torch.no_grad():
        model(x)
        old = weakref.ref(model[0]._parameters["weight"].untyped_storage())
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        model(x)
    gc.collect()
    assert old() is None


@waiting_for("frozen swap")
def test_a_frozen_master_is_swapped(provider: Provider) -> None:
    model = nn.Linear(8, 8)
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, 8)
    model(x).sum().backward()
    master = model._parameters["weight"]
    master.requires_grad_(False)
    gc.collect()
    torch.utils.swap_tensors(master, nn.Parameter(torch.ones(8, 8), requires_grad=False))
    del master
    provider.assert_as_masters(model, x)


def test_coded_masters_that_were_frozen_are_cast(provider: Provider) -> None:
    model = code_masters(mlp(24))
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, 24)
    model(x).sum().backward()
    model[0].weight.requires_grad = False  # torch swaps the parameters of a wrapper where it casts a module
    provider.assert_as_masters(model.half(), x)


def test_a_coded_master_is_written_silently_before_a_new_plan(provider: Provider) -> None:
    model = code_masters(mlp(24).eval())
    provider.install(model, dtype=torch.float64, budget="auto", prefetch=0)
    first, *_, last = model.parameters()
    x = provider.randn(2, 24)
    with torch.no_grad():
        model(x)
        for _ in range(2):  # the new plan comes two calls after the master is plain
            first.fill_(0.5)
            model(x)
        last.detach().numpy()[...] = 7.0
        provider.assert_as_masters(model, x)


# Writes on what is handed out -------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_coded_master_and_what_is_handed_out_are_written(provider: Provider, budget: str | None) -> None:
    model = code_masters(nn.Sequential(nn.Linear(24, 24)))
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    held, master = model[0].weight, model[0]._parameters["weight"]
    with torch.no_grad():
        for row in range(0, 8, 2):
            master.detach().numpy()[row] = row
            held[row + 1] = row + 1.0
            handle.flush()
            written = model.state_dict()["0.weight"][: row + 2]
            testing.assert_bit_equal(written[:, 0], torch.arange(row + 2.0))


class Counts(nn.Module):
    """Counts calls in a buffer that shares a page with its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(24))
        self.register_buffer("count", torch.zeros(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.gain


def test_a_write_beside_a_mapped_buffer_that_is_written(provider: Provider, mapped: Mapped) -> None:
    model = mapped(Counts())
    provider.install(model, dtype=torch.float64, prefetch=0)
    held, x = model.gain, provider.randn(2, 24)
    with torch.no_grad():
        held.fill_(0.5)
        for _ in range(3):
            testing.assert_bit_equal(model(x), x * 0.5)
    assert model.state_dict()["gain"].unique().tolist() == [0.5]
    del held


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_part_of_a_large_tensor_that_is_held(provider: Provider, budget: str | None) -> None:
    model = mlp(160).eval()
    provider.install(model, dtype=torch.float64, budget=budget)
    x, held = provider.randn(2, 160), model[2].weight
    with torch.no_grad():
        for row in (5, 77):
            held.data[row, 3] = 9.0
            model(x)
            assert model.state_dict()["2.weight"][row, 3] == 9.0
            provider.assert_as_masters(model, x)
    del held


class WritesFirst(nn.Module):
    """Writes on the first of two parameters of one memory, which somebody keeps, and reads the second."""

    def __init__(self) -> None:
        super().__init__()
        one = coded(torch.ones(600, 600))
        self.one, self.other = nn.Parameter(one), nn.Parameter(one.detach())
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, value: float) -> torch.Tensor:
        self.other.sum()
        self.kept.append(self.one.fill_(value))
        return x * self.other[0, 0]


def test_a_write_shows_in_the_coded_master_of_the_same_content(provider: Provider) -> None:
    model = WritesFirst()
    provider.install(model, dtype=torch.float64, budget="1GiB", prefetch=0)
    x = provider.randn(3)
    with torch.no_grad():
        for value in (2.0, 3.0, 4.0):
            testing.assert_bit_equal(model(x, value), x * value)


# Statistics and buffers -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_statistics_when_masters_are_read_before_backward(provider: Provider, budget: str | None) -> None:
    if PRETEND:
        skip_or_fail("the pretend device has no backward of a bfloat16 batch norm, a GPU has", cuda=True)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    provider.install(model, dtype=torch.bfloat16, budget=budget)
    for step in range(3):
        x = provider.randn(5, 6, dtype=torch.bfloat16, seed=step)
        moved = testing.moved(model, provider.device, torch.bfloat16)
        output, expected = model.train()(x), moved.train()(x)
        model.state_dict()
        output.sum().backward()
        testing.assert_bit_equal(output.detach(), expected.detach(), f"output of step {step}")
        for name, buffer in moved.named_buffers():
            found = model.get_buffer(name)
            testing.assert_bit_equal(found, buffer.to("cpu", found.dtype), f"{name} of step {step}")


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, x[:1].detach()])
        return self.linear(x)


def test_a_buffer_that_grows_moves_no_resident_again(provider: Provider) -> None:
    model = Grows().eval()
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, 8)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        before = handle.stats().bytes_moved
        for _ in range(3):
            model(x)
    cached = model.get_buffer("cache").numel() * 8 * 3
    assert handle.stats().bytes_moved - before <= cached


def test_backward_of_a_lazy_norm(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyBatchNorm1d())
    provider.install(model, dtype=torch.float64)
    for _ in range(2):
        model(provider.randn(5, 6)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Graphs, transforms, plans and threads ----------------------------------------------------------------


@pytest.mark.parametrize("calls", [(0, 3), (0, 1, 2, 3)], ids=["two", "all"])
def test_a_tuning_that_falls_into_a_functional_call(provider: Provider, calls: tuple[int, ...]) -> None:
    model = mlp(24).eval()
    moved, handle = provider.pair(model, budget="1GiB", prefetch=0)
    x = provider.randn(2, 24)
    handle.retune()
    with torch.no_grad():
        for call in range(6):
            new = {"0.weight": provider.randn(24, 24, seed=call)} if call in calls else {}
            found, expected = (torch.func.functional_call(m, new, (x,)) for m in (model, moved))
            testing.assert_bit_equal(found, expected, f"output of call {call}")


def test_retune_while_threads_run_the_model(provider: Provider) -> None:
    model = mlp(24, 5).eval()
    moved, handle = provider.pair(model, budget="1GiB")
    x = provider.randn(2, 24)
    with torch.no_grad():
        expected = moved(x)
    outputs: list[torch.Tensor] = []

    def run(_: int) -> None:
        with torch.no_grad():
            outputs.append(model(x))

    with repeated(run):
        while len(outputs) < 200:
            handle.retune()
    testing.assert_bit_equal(outputs, [expected] * len(outputs))


class Slides(nn.Module):
    """Assigns a buffer of another shape in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.register_buffer("cache", torch.zeros(1, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = self.cache if len(self.cache) < 4 else self.cache[:1]
        self.cache = torch.cat([cache, x[:1]])
        return self.second(self.first(x))


def test_a_tuning_of_a_model_that_assigns_buffers(provider: Provider, mapped: Mapped) -> None:
    model = mapped(Slides().eval())
    handle = provider.install(model, budget=8000, prefetch=0)
    handle.retune()
    x = provider.randn(2, 24, dtype=torch.float32)
    with torch.no_grad():
        expected = testing.moved(model, provider.device)(x)
        for _ in range(8):
            testing.assert_bit_equal(model(x), expected)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_master_is_swapped_after_the_model_was_cast(provider: Provider, budget: str | None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    provider.install(model, dtype=torch.bfloat16, budget=budget)
    model(provider.randn(2, 8, dtype=torch.bfloat16))
    model.double()
    master = model[0]._parameters["weight"]
    torch.utils.swap_tensors(master, nn.Parameter(torch.ones(8, 8)))
    assert model[0].weight.unique().tolist() == [1.0]


def test_backward_after_a_statistic_that_somebody_holds(provider: Provider) -> None:
    # The held tensor is handed out again, and written back to its master at the end of the forward.
    model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.Conv2d(24, 8, 3, groups=2))
    moved, _ = provider.pair(model.eval(), prefetch=0)
    held = model[1].running_mean
    model.train(), moved.train()
    x = provider.randn(5, 3, 8, 8)
    model(x).sum().backward()
    moved(x).sum().backward()
    assert held is not None
    testing.assert_bit_equal(
        [p.grad.to(provider.device, torch.float64) for p in model.parameters()],
        [p.grad.float().double() for p in moved.parameters()],
        "gradients",
    )
