"""`.data` of a weight that is given other data, or written in place, inside a forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing

BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
LOST = "pure Python cannot see the assignment, which is lost"


class Assigning(nn.Module):
    """Gives its weight other data in its forward, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 3.0))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self, self.way)()
        return x * self.weight

    def in_place(self) -> None:
        self.weight.data -= 1
        self.weight.data *= 2

    def by_a_name(self) -> None:
        values = self.weight.data
        values -= 1
        self.weight.data = values

    def assigned(self) -> None:
        self.weight.data = self.weight.data / 2

    def turned(self) -> None:
        values = torch.arange(16.0).view(4, 4)
        self.weight.data = values.to(self.weight.device, self.weight.dtype).t()

    def on_a_kept_tensor(self) -> None:
        kept = self.weight
        kept.data = kept.data * 4
        kept.data = kept.data + 1

    def other_dtype(self) -> None:
        self.weight.data = self.weight.data.half()

    def other_shape(self) -> None:
        self.weight.data = self.weight.data[:2]


IN_PLACE, NEW = ("in_place", "by_a_name"), ("assigned", "turned", "on_a_kept_tensor")


@BUDGETS
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", [*IN_PLACE, *NEW])
def test_data_assigned_inside_a_forward(provider: Provider, way: str, grad: bool, budget: str | None) -> None:
    if not provider.native:
        pytest.skip(LOST)
    model = Assigning(way)
    moved, _ = provider.pair(model, budget=budget)
    master = model._parameters["weight"]
    x = provider.randn(4)
    for _ in range(3):
        results = []
        for each in (model, moved):
            with torch.set_grad_enabled(grad):
                output = each(x)
            if grad:
                output.sum().backward()
            results.append(output.detach())
        testing.assert_bit_equal(*results, "output")
        assert model._parameters["weight"] is master
        value = model.get_parameter("weight").detach().double()
        testing.assert_bit_equal(value, moved.weight.detach().cpu(), "master")
    if grad:
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, moved.weight.grad.float().cpu(), "gradient")


@pytest.mark.parametrize("way", ["other_dtype", "other_shape"])
def test_data_of_another_kind_assigned_inside_a_forward_is_refused(provider: Provider, way: str) -> None:
    if not provider.native:
        pytest.skip(LOST)
    model = Assigning(way)
    provider.pair(model)
    with pytest.raises(
        RuntimeError, match=r"takes a t of the weight's shape, dtype and device.* Assign such"
    ):
        model(provider.randn(4))
    assert model.get_parameter("weight").unique().tolist() == [3]


def test_data_assigned_after_the_weight_was_used_is_torchs_error(provider: Provider) -> None:
    if not provider.native:
        pytest.skip(LOST)

    class UsedBefore(Assigning):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            self.weight.data = self.weight.data * 2
            return y

    model = UsedBefore("")
    provider.pair(model)
    x = provider.randn(4).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
