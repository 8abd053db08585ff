"""Masters that come with one call and go after it: only they are moved, and no plan is made for them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from coded_masters import stored_bytes
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

WIDTH = 64


class Remembers(nn.Module):
    """Appends each input to a buffer, which grows."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(features=WIDTH)
        self.register_buffer("cache", torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x])
        y: Tensor = self.layers(x)
        return y + self.cache.sum(0)


def test_a_cache_that_grows(provider: Provider) -> None:
    model = Remembers().eval()
    plain = testing.moved(model, provider.device, torch.float64)
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH).float().double()  # a buffer keeps its dtype
    moved = []
    with torch.no_grad():
        for _ in range(8):
            before = handle.stats().bytes_moved
            testing.assert_bit_equal(model(x), plain(x))
            moved.append(handle.stats().bytes_moved - before)
    layers = sum(stored_bytes(p) for p in model.layers.parameters())
    assert moved[0] >= layers
    assert all(bytes_moved < layers / 2 for bytes_moved in moved[1:]), moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_a_row", [1, 3])
def test_functional_call(provider: Provider, in_a_row: int, dtype: torch.dtype) -> None:
    model = mlp(features=WIDTH).eval()
    handle = provider.install(model, dtype=dtype, budget="1GiB")
    moved = testing.moved(model, provider.device, dtype)
    x = provider.randn(2, WIDTH, dtype=dtype)
    with torch.no_grad():
        model(x)
        for _ in range(4):
            for _ in range(in_a_row):
                others = {name: p.detach() + 1 for name, p in model.named_parameters()}
                before = handle.stats().bytes_moved
                found = torch.func.functional_call(model, others, (x,))
                there = handle.stats().bytes_moved
                assert there - before == sum(p.nbytes for p in others.values())
                plain = {name: p.to(provider.device, dtype) for name, p in others.items()}
                testing.assert_bit_equal(found, torch.func.functional_call(moved, plain, (x,)))
            testing.assert_bit_equal(model(x), moved(x))
            assert handle.stats().bytes_moved == there


def test_a_master_that_nobody_has_any_more_is_freed(provider: Provider) -> None:
    model = mlp(features=WIDTH).eval()
    provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        model(x)
        gone = weakref.ref(model[0]._parameters["weight"].untyped_storage())
        model[0]._parameters["weight"] = nn.Parameter(torch.randn(WIDTH, WIDTH))
        model(x)
    assert gone() is None


@pytest.mark.parametrize("budget", ["130KiB", "200KiB"], ids=["streamed", "resident"])
def test_functional_call_under_a_strict_budget(provider: Provider, budget: str) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))).eval()
    provider.install(model, dtype=torch.float64, budget=budget, strict_budget=True)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            others = {name: p.detach() + 1 for name, p in model.named_parameters()}
            torch.func.functional_call(model, others, (x,))
            provider.assert_as_masters(model, x)


@pytest.mark.parametrize("old", ["gone", "kept"])
def test_a_master_that_stays_is_planned_for(provider: Provider, old: str) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).eval()
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        model(x)
        kept = model[1]._parameters["weight"] if old == "kept" else None
        model[1]._parameters["weight"] = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        for _ in range(5):
            provider.assert_as_masters(model, x)
        moved = handle.stats().bytes_moved
        model(x)
        assert handle.stats().bytes_moved == moved  # all of it is resident again
    del kept


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("attribute", ["method", "module", "hook"])
def test_what_hangs_on_a_master_keeps_no_model_alive(
    provider: Provider, attribute: str, dtype: torch.dtype | None, budget: str | None
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    handle = provider.install(model, dtype=dtype, budget=budget)
    x = provider.randn(2, 8, dtype=dtype or torch.float32)
    model(x).sum().backward()
    for layer in model:
        master = layer._parameters["weight"]
        if attribute == "method":
            master.weight_loader = layer.load_state_dict
        elif attribute == "module":
            master.owner = model
        else:
            master.register_hook(lambda gradient, model=model: None)
    model(x).sum().backward()
    assert model[0].weight is not None
    gone = weakref.ref(model), weakref.ref(master.untyped_storage())
    del model, layer, master
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not handle.active


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_attribute_of_the_instance_hides_a_parameter(provider: Provider, when: str) -> None:
    model = nn.Linear(8, 8)
    if when == "before":
        model.__dict__["weight"] = "mine"
    provider.install(model, dtype=torch.float64)
    if when == "after":
        model.__dict__["weight"] = "mine"
    assert model.weight == "mine"
    del model.__dict__["weight"]
    assert isinstance(model.weight, torch.Tensor)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x)))
        return y


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    "names",
    [("first.weight",), ("third.weight",), ("first.weight", "second.weight")],
    ids=["tied", "untied", "tie broken"],
)
@pytest.mark.parametrize("own_between", [False, True], ids=["alone", "own between"])
def test_functional_call_keeps_nothing(
    provider: Provider, budget: str | None, names: tuple[str, ...], own_between: bool
) -> None:
    """A functional_call keeps neither its tensors nor their memory, whichever weights are tied.

    Pure Python keeps those of the last call.
    """
    model = Tied().eval()
    provider.install(model, dtype=torch.float64, budget=budget)
    plain = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(2, WIDTH)
    watches: list[weakref.ref[object]] = []
    with torch.no_grad():
        model(x)
        for number in range(6):
            owners = [torch.randn(WIDTH, WIDTH).numpy() for _ in names]
            others = dict(zip(names, map(torch.from_numpy, owners), strict=True))
            watches += [weakref.ref(owner) for owner in owners]
            found = torch.func.functional_call(model, others, (x,), tie_weights=len(names) == 1)
            moved = {name: other.to(provider.device, torch.float64) for name, other in others.items()}
            expected = torch.func.functional_call(plain, moved, (x,), tie_weights=len(names) == 1)
            testing.assert_bit_equal(found, expected, f"call {number}")
            del owners, others
            gc.collect()
            kept = sum(watch() is not None for watch in watches)
            assert kept <= (0 if provider.native else len(names)), f"call {number}"
            if own_between:
                testing.assert_bit_equal(model(x), plain(x))


class Bank(nn.Module):
    """A buffer whose size changes with each call, and a weight of the same group that trains."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("bank", torch.zeros(8, WIDTH))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        y = torch.tanh(x * self.scale) + self.bank.mean(0)
        self.bank = torch.from_numpy(torch.full((rows, WIDTH), 1.0 / rows).numpy()).clone()
        return y


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("rows", [20, 20_000], ids=["small", "large"])
def test_a_buffer_of_another_size_beside_what_trains(
    provider: Provider, budget: str | None, rows: int
) -> None:
    """A buffer's old memory may be gone when the step of an optimizer writes another weight of its group."""
    model = Bank()
    provider.install(model, dtype=torch.float64, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        x = provider.randn(2, WIDTH, seed=step)
        plain = testing.moved(model, provider.device, torch.float64)
        # `moved` casts all. A buffer that a forward has assigned on the compute device keeps its dtype.
        if step and provider.device.type == "cpu":
            plain.bank = plain.bank.float()
        y = model(x, rows + step)
        testing.assert_bit_equal(y, plain(x, 3))
        y.sum().backward()
        optimizer.step()


@pytest.mark.parametrize("budget", [None, "40000B", "1GiB"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("grad", [False, True], ids=["no graph", "graph"])
def test_what_is_held_over_a_functional_call(
    provider: Provider, budget: str | None, tied: bool, grad: bool
) -> None:
    model = Tied().eval() if tied else mlp(features=WIDTH).eval()
    budget = "140000B" if budget == "40000B" else budget
    provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, WIDTH)
    layer = model.first if isinstance(model, Tied) else model[0]
    name = next(name for name, _ in model.named_parameters())
    for round in range(3):
        with torch.set_grad_enabled(grad):
            model(x)
            held = layer.weight
            others = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
            torch.func.functional_call(model, others, (x,))
        with torch.no_grad():
            held.fill_(round)
        assert model.state_dict()[name].eq(round).all()
        del held
        assert model.state_dict()[name].eq(round).all()
