"""Writes to a handed-out tensor and then to its master: both count, or a warning says what is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import checkpoint, testing

BUDGETS = pytest.mark.parametrize("budget", ["1GiB", "minimum"])
Write = Callable[[torch.Tensor], object]


def set_rows(w: torch.Tensor) -> None:
    w[1:3] = 0.5


def multiply(w: torch.Tensor) -> None:
    w *= 0.5


def multiply_data(w: torch.Tensor) -> None:
    w.data *= 0.5


def set_rows_of_data(w: torch.Tensor) -> None:
    w.data[1:3] = 0.5


WRITES: dict[str, Write] = {
    "method": lambda w: w.mul_(0.5),
    "copy": lambda w: w.copy_(torch.full_like(w, 0.25)),
    "init": lambda w: nn.init.constant_(w, 0.5),
    "item": set_rows,
    "operator": multiply,
    "method of data": lambda w: w.data.mul_(0.5),
    "operator on data": multiply_data,
    "items of data": set_rows_of_data,
    "row of data": lambda w: w.data[0].mul_(0.5),
    "foreach of data": lambda w: torch._foreach_mul_([w.data], 0.5),
    "out": lambda w: torch.mul(w.detach(), 0.5, out=w.data),
}


def step(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.full_like(p, 0.25)
    torch.optim.SGD(parameters, lr=1.0).step()


def assign(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data = p.data + 1


LATER: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "optimizer": step,
    "method": lambda parameters: parameters[0].add_(0.25),
    "foreach": lambda parameters: torch._foreach_add_(parameters, 0.25),
    "data": assign,
    "part": lambda parameters: parameters[0][0].add_(0.25),
}


def assert_same_masters(model: nn.Module, moved: nn.Module) -> None:
    """Assert that masters are equal in values that float32 represents exactly."""
    expected = {name: value.float().cpu() for name, value in moved.state_dict().items()}
    testing.assert_bit_equal(model.state_dict(), expected, "masters")


def layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-4, 5, p.shape) / 4)
    return model


@BUDGETS
@pytest.mark.parametrize("named", [False, True], ids=["passing", "named"])
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_on_both(provider: Provider, write: str, later: str, named: bool, budget: str) -> None:
    model = layers()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    for _ in range(2):
        for m in (model, moved):
            parameters = list(m.parameters())
            m(x).square().sum().backward()
            with torch.no_grad():
                held = [m[0].weight, m[2].weight] if named else None
                for layer in (m[0], m[2]):
                    WRITES[write](layer.weight)
                LATER[later](parameters)
                del held
        testing.assert_bit_equal(
            model.state_dict(), {k: v.float().cpu() for k, v in moved.state_dict().items()}
        )


@BUDGETS
@pytest.mark.parametrize("write", ["view", "alias", "foreach"])
def test_what_an_optimizer_is_about_to_write(provider: Provider, write: str, budget: str) -> None:
    """Writes on a view, on an alias, or by a function are in the master before an optimizer's step."""
    model = layers()
    moved, _ = provider.pair(model, budget=budget)
    for m in (model, moved):
        with torch.no_grad():
            if write == "foreach":
                held = m[1].weight
                torch._foreach_mul_([held], 0.5)
            else:
                held = m[1].weight[0] if write == "view" else m[1].weight.detach()
                held.mul_(0.5)
        step(list(m._modules["1"]._parameters.values()))
        del held
    assert_same_masters(model, moved)


@BUDGETS
@pytest.mark.parametrize("write", WRITES)
def test_a_write_after_the_install(provider: Provider, write: str, budget: str) -> None:
    """What was handed out before the uninstall is the parameter, for whoever still has it."""
    model = layers()
    moved, handle = provider.pair(model, budget=budget)
    held = [model[1].weight, moved[1].weight]
    handle.uninstall()
    with torch.no_grad():
        for w in held:
            WRITES[write](w)
    del w, held
    assert_same_masters(model, moved)


class Halves(nn.Module):
    """A layer whose forward halves its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x @ self.weight


@BUDGETS
@pytest.mark.parametrize("later", LATER)
def test_a_write_of_the_forward(provider: Provider, later: str, budget: str) -> None:
    model = nn.Sequential(Halves(), nn.Linear(8, 8))
    moved, _ = provider.pair(model, budget=budget)
    lists = {m: list(m.parameters())[:1] for m in (model, moved)}
    x = provider.randn(2, 8)
    for _ in range(3):
        for m in (model, moved):
            with torch.no_grad():
                m(x)
                LATER[later](lists[m])
    assert_same_masters(model, moved)


@BUDGETS
def test_renormalised_embeddings_train(provider: Provider, budget: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), nn.Linear(8, 4)).double()
    moved, _ = provider.pair(model, budget=budget)
    x = torch.arange(10).view(5, 2).to(provider.device)
    for m in (model, moved):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    if provider.device.type == "cpu":  # a step on a GPU may round differently
        testing.assert_bit_equal(model.state_dict(), moved.state_dict())


HELD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda w: w[0],
    "data": lambda w: w.data,
    "view of data": lambda w: w.data[0],
}


@BUDGETS
@pytest.mark.parametrize("held", HELD)
def test_a_lost_write_is_told(provider: Provider, held: str, budget: str) -> None:
    model = layers()
    _, handle = provider.pair(model, budget=budget)
    parameters = list(model.parameters())
    x = provider.randn(2, 8)
    with torch.no_grad():
        model(x)
        view = HELD[held](model[1].weight)
        view.mul_(0.5)
        expected = parameters[2].clone() + 1
        parameters[2].add_(1)
        with pytest.warns(dynswap_ext.DynswapWarning, match="handed out from 1.weight is dropped"):
            del view
            handle.flush()
            model(x)
    testing.assert_bit_equal(parameters[2], expected)


@BUDGETS
def test_what_was_only_read_is_not_told_of(provider: Provider, budget: str) -> None:
    model = layers()
    moved, handle = provider.pair(model, budget=budget)
    for m in (model, moved):
        parameters = list(m.parameters())
        with torch.no_grad():
            held = [m[1].weight, m[1].weight.data, m[2].weight.data[0]]
            assert all(torch.isfinite(w).all() for w in held)
            m[1].weight.data.mul_(0.5)
            for p in parameters:
                p.add_(0.25)
            del held
    handle.flush()
    model(provider.randn(2, 8))  # a warning is an error here
    assert_same_masters(model, moved)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_writes_to_neighbours_in_a_file_take_none_from_what_lies_between(
    provider: Provider, budget: str | None, tmp_path: Path
) -> None:
    """Writes to weights in a file do not undo writes to weights that share their pages.

    The first writes make both pages of a weight private.
    """

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(700)) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for i in (0, 2, 1, 4, 5, 3):
                    self.weights[i].mul_(2)
            return x

    model = Doubles()
    checkpoint.save(model, tmp_path / "w.safetensors")
    provider.install(checkpoint.load(model, tmp_path / "w.safetensors"), dtype=torch.float64, budget=budget)
    for _ in range(2):
        model(provider.randn(1))
    for name, master in model.state_dict().items():
        assert torch.equal(master, torch.full_like(master, 4.0)), name
