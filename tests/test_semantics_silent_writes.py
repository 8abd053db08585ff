"""Writes that bump no version counter are noticed, whoever makes them, wherever, and however small.

If a master is sampled, only a change of the whole is (docs/contract.md, "State").
"""

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


class Uses(nn.Module):
    """A weight of any size, which a forward reads whole."""

    def __init__(self, size: int, *, parameter: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.randint(-8, 8, (size,)).to(dtype)
        if parameter:
            self.weight = nn.Parameter(values)
        else:
            self.register_buffer("weight", values)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


# The way of a write x its target x its place, compared with a plain model -----------------------------


def nines(part: Tensor) -> Tensor:
    """Return the bytes of as many nines as the part has elements."""
    return torch.full_like(part, 9.0, device="cpu", requires_grad=False).view(torch.uint8)


def flat(t: Tensor) -> Tensor:
    return t.detach().view(-1)


def by_numpy(t: Tensor, at: slice) -> None:
    flat(t)[at].view(torch.uint8).numpy()[...] = nines(flat(t)[at]).numpy()


def by_storage(t: Tensor, at: slice) -> None:
    begin = (t.storage_offset() + (at.start or 0)) * t.element_size()
    new = nines(flat(t)[at])
    t.untyped_storage()[begin : begin + len(new)].copy_(new.untyped_storage())


def by_address(t: Tensor, at: slice) -> None:
    part, new = flat(t)[at], nines(flat(t)[at])
    ctypes.memmove(part.data_ptr(), new.data_ptr(), len(new))


def by_a_fused_step(t: Tensor, at: slice) -> None:
    t.grad = torch.zeros_like(t)
    t.grad[at] = t.detach()[at] - 9
    torch.optim.SGD([t], lr=1.0, fused=True).step()
    t.grad = None


def by_set(t: Tensor, at: slice) -> None:
    new = t.detach().clone()
    new[at] = 9.0
    t.set_(new)


#: Ways to write 9 to some elements.
WRITES: dict[str, Callable[[Tensor, slice], object]] = {
    "data": lambda t, at: t.data.view(-1).__setitem__(at, 9.0),
    "out=": lambda t, at: torch.full(flat(t)[at].shape, 9.0, out=t.data.view(-1)[at]),
    "foreach": lambda t, at: torch._foreach_copy_([t.data.view(-1)[at]], [torch.full_like(flat(t)[at], 9.0)]),
    "numpy": by_numpy,
    "dlpack": lambda t, at: torch.from_dlpack(flat(t)).__setitem__(at, 9.0),
    "storage": by_storage,
    "address": by_address,
    "fused step": by_a_fused_step,
    "set_": by_set,
    "alias": lambda t, at: flat(t)[at].fill_(9.0),  # bumps the version, which the two share
}
#: The ways that cannot write to a device's memory.
IN_RAM = ("numpy", "dlpack", "storage", "address")
#: The tensor that is written: a master, or a tensor that was handed out for it.
TARGETS: dict[str, Callable[[Uses], Tensor]] = {
    "parameter": lambda m: m._parameters["weight"],
    "buffer": lambda m: m._buffers["weight"],
    "view of the master": lambda m: m._parameters["weight"].detach(),
    "handed out": lambda m: m.weight,
    "handed out of a buffer": lambda m: m.weight,
    "view": lambda m: m.weight.detach(),  # outlives the tensor that it was made of
}
MASTERS = ("parameter", "buffer", "view of the master")
#: The size of the weight, and which of its elements are written, one after the other. Small weights are
#: compared as a whole. Of large ones the kernel tracks the pages, and their ends, which share a page with
#: other data, are compared. Without such tracking they are sampled.
PLACES = {
    "of few": (1000, [slice(i, i + 1) for i in (0, 499, 999)]),
    "of many": (60_001, [slice(i, i + 1) for i in (0, 20_000, 60_000)]),
    "whole": (60_001, [slice(None)]),
}
PAIRS = [
    pytest.param(write, target, id=f"{write}-{target}")
    for write in WRITES
    for target in TARGETS
    if (write != "fused step" or target == "parameter") and (write != "set_" or "view" not in target)
]


@BUDGETS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("write", "target"), PAIRS)
def test_a_write_beside_a_plain_model(
    provider: Provider, write: str, target: str, place: str, budget: str | None
) -> None:
    """A write is noticed before any call, on a tensor that is held over calls, and after other writes."""
    size, parts = PLACES[place]
    model = Uses(size, parameter="buffer" not in target)
    moved, handle = provider.pair(model, budget=budget)
    if target not in MASTERS and provider.device.type != "cpu" and (write in IN_RAM or target == "view"):
        pytest.skip("such a write is not seen on a device, or cannot be made there")
    if target in MASTERS and place == "of many" and not provider.sees_every_write(handle):
        pytest.skip("sampled: it may go unseen")
    x = provider.randn(size)
    with torch.no_grad():
        for calls in (0, 1, 2):
            for part in parts:
                written = TARGETS[target](model)
                for _ in range(calls):
                    model(x)
                WRITES[write](written, part)
                del written
                flat(moved.weight)[part] = 9.0
                testing.assert_bit_equal(model(x), moved(x), f"after {calls} calls, {part}")
                (model._parameters or model._buffers)["weight"].data.neg_()
                flat(moved.weight).neg_()
                testing.assert_bit_equal(model(x), moved(x), f"after {calls} calls, {part}, written again")
    testing.assert_bit_equal(model.state_dict()["weight"], flat(moved.weight).float().cpu())


# What the table does not say -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@BUDGETS
def test_other_dtypes(provider: Provider, dtype: torch.dtype, budget: str | None) -> None:
    model = Uses(50_000, dtype=dtype)
    handle = provider.install(model, dtype=torch.float32, budget=budget)
    x = provider.randn(50_000, dtype=torch.float32)
    provider.assert_as_masters(model, x)
    for at in (7, 33_333):
        written = slice(at, at + 1 if provider.sees_every_write(handle) else None)
        WRITES["data"](model._parameters["weight"], written)
        provider.assert_as_masters(model, x)


@BUDGETS
def test_a_mapped_master_and_its_neighbours(provider: Provider, mapped: Mapped, budget: str | None) -> None:
    """A write to a small master does not count as one to others in the same page."""
    model = mapped(nn.Sequential(*(Uses(size) for size in (100_000, 50, 60, 100_000))))
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    xs = [provider.randn(layer._parameters["weight"].numel()) for layer in model]

    def look() -> None:
        for layer, x in zip(model, xs, strict=True):
            provider.assert_as_masters(layer, x)

    look()
    for layer in model:
        master = layer._parameters["weight"]
        if master.numel() > 100 and not provider.sees_every_write(handle):
            continue
        for at in (0, master.numel() // 2, master.numel() // 2, master.numel() - 1):
            WRITES["data"](master, slice(at, at + 1))
            look()
    if budget is not None and provider.native:
        moved = handle.stats().refetches
        WRITES["data"](model[1]._parameters["weight"], slice(3, 4))
        look()
        # At most its own group moves again, however many masters are in its page.
        assert handle.stats().refetches - moved <= 1


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
        provider.assert_as_masters(model, tokens)
        step.zero_grad()
        model(tokens).square().sum().backward()
        step.step()
    assert handle.report().sampled_bytes == 0 or not provider.native


@BUDGETS
def test_the_layout_of_a_master(provider: Provider, budget: str | None) -> None:
    model = nn.Linear(24, 24)
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 24)
    provider.assert_as_masters(model, x)
    master = model._parameters["weight"]
    for layout in (
        lambda t: t.t(),
        lambda t: t.as_strided((24, 24), (24, 1)),
        lambda t: t.view(-1)[: 24 * 24].view(24, 24).t(),
        lambda t: t.t().view(12, 48).view(24, 24),
    ):
        master.data = layout(master.data)
        provider.assert_as_masters(model, x)


def test_nothing_is_moved_again_for_a_look(provider: Provider) -> None:
    """Reads of masters or their state, and calls in between, do not count as writes."""
    model = nn.Sequential(*(Uses(50_000) for _ in range(3)))
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(50_000)
    provider.assert_as_masters(model, x)
    moved = handle.stats().bytes_moved
    for _ in range(3):
        model.state_dict()
        [p.detach().numpy().sum() for p in model.parameters()]
        provider.assert_as_masters(model, x)
    assert handle.stats().bytes_moved == moved


def test_two_installs_over_the_same_memory(provider: Provider) -> None:
    """One install's look for writes hides none from another install of the same memory."""
    one = Uses(50_000)
    other = Uses(50_000)
    other.weight = nn.Parameter(one.weight.detach())
    handles = [provider.install(model, dtype=torch.float64, budget="1GiB") for model in (one, other)]
    x = provider.randn(50_000)
    for at in (3, 40_000):
        written = slice(at, at + 1 if provider.sees_every_write(*handles) else None)
        WRITES["data"](one._parameters["weight"], written)
        for model in (other, one):
            provider.assert_as_masters(model, x)


@pytest.mark.filterwarnings("error:what was written:dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("size", [24, 300_000])
def test_the_end_of_an_install_over_the_same_memory_is_no_write(provider: Provider, size: int) -> None:
    """The end of an install is no write to its masters.

    Otherwise writes on tensors that the next install has handed out would be dropped.
    """
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
    """A write to new data is noticed, though the data may be page-locked when the next call begins."""
    model = nn.Sequential(Uses(size), Uses(size))
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(size)
    provider.assert_as_masters(model, x)
    for number in range(2):
        for layer in model:
            master = layer._parameters["weight"]
            master.data = torch.cat([master.detach(), torch.ones(3 * number)])[:size]
        provider.assert_as_masters(model, x)
        for _ in range(3):
            model[0]._parameters["weight"].data.mul_(0.5)
            provider.assert_as_masters(model, x)
