"""Writes to masters that bump no version counter are seen, by whatever code and however small they are."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import testing

Mapped = Callable[[nn.Module], nn.Module]
BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])

#: Each writes one element, at a place in the tensor's memory.
WRITES: dict[str, Callable[[Tensor, int], object]] = {
    "data": lambda p, at: p.data.view(-1).__setitem__(at, 9.0),
    "numpy": lambda p, at: p.detach().numpy().reshape(-1).__setitem__(at, 9.0),
    "dlpack": lambda p, at: torch.from_dlpack(p.detach()).view(-1).__setitem__(at, 9.0),
    "address": lambda p, at: ctypes.memset(p.data_ptr() + at * p.element_size(), 65, p.element_size()),
    "storage": lambda p, at: p.untyped_storage().__setitem__(p.element_size() * at + 1, 65),
}


class Uses(nn.Module):
    """A weight of any size, read as a whole."""

    def __init__(self, size: int, *, parameter: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.randn(size).to(dtype)
        if parameter:
            self.weight = nn.Parameter(values)
        else:
            self.register_buffer("weight", values)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def assert_as_masters(provider: Provider, model: nn.Module, x: Tensor) -> None:
    dtype = x.dtype if x.is_floating_point() else torch.float64
    with torch.no_grad():
        testing.assert_bit_equal(model(x), testing.moved(model, provider.device, dtype)(x))


# Sizes that are hashed, and sizes that the kernel tracks, whose ends share a page with others and are hashed.
@pytest.mark.parametrize("size", [3, 1000, 9000, 60_001, 300_000])
@pytest.mark.parametrize("write", WRITES)
@BUDGETS
def test_one_element(provider: Provider, write: str, size: int, budget: str | None) -> None:
    model = nn.Sequential(*(Uses(size) for _ in range(3)))
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(size)
    assert_as_masters(provider, model, x)
    for at in (0, size // 2, size // 3, size - 1):
        for layer in model:
            WRITES[write](layer._parameters["weight"], at)
        assert_as_masters(provider, model, x)


@pytest.mark.parametrize("parameter", [True, False], ids=["parameter", "buffer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@BUDGETS
def test_other_dtypes_and_buffers(
    provider: Provider, dtype: torch.dtype, parameter: bool, budget: str | None
) -> None:
    model = Uses(50_000, parameter=parameter, dtype=dtype).eval()
    provider.install(model, dtype=torch.float32, budget=budget)
    x = provider.randn(50_000, dtype=torch.float32)
    assert_as_masters(provider, model, x)
    master = (model._parameters if parameter else model._buffers)["weight"]
    for at in (7, 33_333):
        WRITES["data"](master, at)
        assert_as_masters(provider, model, x)


@BUDGETS
def test_a_mapped_master_and_its_neighbours(provider: Provider, mapped: Mapped, budget: str | None) -> None:
    """Small masters share a page: a write to one of them does not count as a write to the others."""
    model = mapped(nn.Sequential(*(Uses(size) for size in (100_000, 50, 60, 100_000))))
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    xs = [provider.randn(layer._parameters["weight"].numel()) for layer in model]

    def look() -> None:
        for layer, x in zip(model, xs, strict=True):
            assert_as_masters(provider, layer, x)

    look()
    for layer in model:
        master = layer._parameters["weight"]
        for at in (0, master.numel() // 2, master.numel() // 2, master.numel() - 1):
            WRITES["data"](master, at)
            look()
    if budget is not None and provider.native:
        moved = handle.stats().refetches
        WRITES["data"](model[1]._parameters["weight"], 3)
        look()
        # At most its own group, however many masters lie in its page.
        assert handle.stats().refetches - moved <= 1


@BUDGETS
def test_a_view_that_was_taken_before(provider: Provider, budget: str | None) -> None:
    base = torch.randn(4, 40_000)
    model = nn.Sequential(*(Uses(40_000) for _ in range(4)))
    for layer, row in zip(model, base, strict=True):
        layer.weight = nn.Parameter(row)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(40_000)
    assert_as_masters(provider, model, x)
    array = base.numpy()
    for row in range(4):
        array[row, 123] = 5.0
        assert_as_masters(provider, model, x)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, weight_decay=0.0, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@BUDGETS
def test_steps_that_write_few_rows(provider: Provider, optimizer: str, budget: str | None) -> None:
    model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 4))
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    step = OPTIMIZERS[optimizer](list(model.parameters()))
    tokens = torch.arange(100, 108, device=provider.device)
    for _ in range(6):
        assert_as_masters(provider, model, tokens)
        step.zero_grad()
        model(tokens).square().sum().backward()
        step.step()
    assert handle.report().sampled_bytes == 0


@BUDGETS
def test_the_layout_of_a_master(provider: Provider, budget: str | None) -> None:
    model = nn.Linear(24, 24)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 24)
    assert_as_masters(provider, model, x)
    master = model._parameters["weight"]
    for layout in (
        lambda t: t.t(),
        lambda t: t.as_strided((24, 24), (24, 1)),
        lambda t: t.view(-1)[: 24 * 24].view(24, 24).t(),
        lambda t: t.t().view(12, 48).view(24, 24),
    ):
        master.data = layout(master.data)
        assert_as_masters(provider, model, x)


def test_nothing_is_moved_again_for_a_look(provider: Provider) -> None:
    """Reading masters or their state, and calls in between, do not count as writes."""
    model = nn.Sequential(*(Uses(50_000) for _ in range(3)))
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(50_000)
    assert_as_masters(provider, model, x)
    moved = handle.stats().bytes_moved
    for _ in range(3):
        model.state_dict()
        [p.detach().numpy().sum() for p in model.parameters()]
        assert_as_masters(provider, model, x)
    assert handle.stats().bytes_moved == moved


def test_two_installs_over_the_same_memory(provider: Provider) -> None:
    """A look by one install hides no write from the other."""
    one = Uses(50_000)
    other = Uses(50_000)
    other.weight = nn.Parameter(one.weight.detach())
    for model in (one, other):
        provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(50_000)
    for at in (3, 40_000):
        WRITES["data"](one._parameters["weight"], at)
        for model in (other, one):
            assert_as_masters(provider, model, x)


@pytest.mark.filterwarnings("error:what was written:dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("size", [24, 300_000])
def test_the_end_of_an_install_over_the_same_memory_is_no_write(provider: Provider, size: int) -> None:
    """Else what is written on a tensor that the next one has handed out would be dropped."""
    model = nn.Sequential(Uses(size), Uses(size))
    x = provider.randn(size)
    for value in (2.0, 3.0):
        handle = provider.install(model, dtype=torch.float64)
        model(x)
        handle = provider.install(model, dtype=torch.float64)
        handed_out = model[0].weight
        gc.collect()
        with torch.no_grad():
            handed_out.copy_(torch.full((size,), value))
        del handed_out
        handle.flush()
        assert model[0]._parameters["weight"].eq(value).all()


@pytest.mark.parametrize("size", [24, 3000, 20_000, 300_000])
@BUDGETS
def test_the_first_write_after_new_data(provider: Provider, budget: str | None, size: int) -> None:
    """New data may be page-locked when the next call begins, with what was written until then."""
    model = nn.Sequential(Uses(size), Uses(size))
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(size)
    assert_as_masters(provider, model, x)
    for number in range(2):
        for layer in model:
            master = layer._parameters["weight"]
            master.data = torch.cat([master.detach(), torch.ones(3 * number)])[:size]
        assert_as_masters(provider, model, x)
        for _ in range(3):
            model[0]._parameters["weight"].data.mul_(0.5)
            assert_as_masters(provider, model, x)
