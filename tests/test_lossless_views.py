"""Masters that are views of coded tensors, and coded masters that change while a graph or a plan is made."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from coded_masters import code_masters, coded
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap import subclasses

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "every second column": lambda t: t[:, ::2],
    "rows": lambda t: t[2:6],
    "of another dtype": lambda t: t.view(torch.bfloat16),
}


class Product(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum(1)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_is_written_on_them_reaches_the_master(
    provider: Provider, view: str, budget: str | None
) -> None:
    torch.manual_seed(0)
    values = torch.randn(16, 16)
    model, plain = Product(VIEWS[view](coded(values))), Product(VIEWS[view](values.clone()))
    provider.install(model, dtype=torch.float64, budget=budget)
    with torch.no_grad():
        for _ in range(2):
            moved = testing.moved(plain, provider.device, torch.float64)
            x = provider.randn(len(plain.weight))
            testing.assert_bit_equal(model(x), moved(x))
            model.weight.neg_()
            plain.weight.neg_()
            testing.assert_bit_equal(model.state_dict()["weight"].detach() + 0, plain.weight.detach())


@pytest.mark.parametrize("write", [lambda w: w.data.mul_(2), lambda w: w.detach().numpy().__imul__(2)])
def test_a_master_that_is_written_before_backward(
    provider: Provider, write: Callable[[torch.Tensor], object]
) -> None:
    """Backward copies streamed weights again, and gets the new values, as of plain masters."""
    if not provider.native:
        pytest.skip("pure Python keeps what it has handed out for backward")
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(16, 16) for _ in range(12)])
    model = code_masters(copy.deepcopy(plain))
    gradients = []
    for each in (model, plain):
        provider.install(each, dtype=torch.float64)
        x = provider.randn(3, 16).requires_grad_()
        output = each(x)
        write(each.get_parameter("3.weight"))
        output.sum().backward()
        gradients.append(x.grad)
    testing.assert_bit_equal(*gradients)


def test_a_master_that_is_replaced_while_it_is_looked_at(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = code_masters(nn.Sequential(nn.Linear(8, 8))).requires_grad_(False)
    look = subclasses._held_content

    def replacing(master: torch.Tensor) -> object:
        found = look(master)  # type: ignore[arg-type]
        if master is model[0]._parameters["weight"]:
            model[0]._parameters["weight"] = nn.Parameter(coded(torch.ones(8, 8)), requires_grad=False)
        return found

    monkeypatch.setattr(subclasses, "_held_content", replacing)
    provider.install(model, dtype=torch.float64)
    provider.assert_as_masters(model, provider.randn(2, 8))
