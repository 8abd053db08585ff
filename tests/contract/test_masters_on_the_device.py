"""Masters on the compute device in another dtype than `dtype=`: they are converted at each access."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.inspect import summary

SIDE = 4


class Scale(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.here = nn.Parameter(torch.arange(1.0, SIDE + 1))
        self.there = nn.Parameter(torch.arange(1.0, SIDE + 1))
        self.register_buffer("count", torch.ones(SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.here * self.there + self.count


@pytest.fixture
def model(provider: Provider) -> Scale:
    if provider.device.type == "cpu":
        pytest.skip("about masters on an accelerator")
    made = Scale()
    made.there = nn.Parameter(made.there.detach().to(provider.device))
    made.count = made.count.to(provider.device)
    return made


def test_they_are_converted(provider: Provider, model: Scale) -> None:
    x = torch.ones(2, SIDE, dtype=torch.float64, device=provider.device)
    expected = testing.moved(model, provider.device, torch.float64)(x)
    provider.install(model, dtype=torch.float64)
    for _ in range(3):
        testing.assert_bit_equal(model(x), expected)
    served = {weight.name: weight.served for weight in summary(model).weights}
    assert served.pop("here") in ("resident", "streamed")  # natively, tiny weights stay
    assert served == {"there": "converted", "count": "converted"}


def test_each_access_is_a_tensor_of_its_own_and_writes_to_it_are_lost(
    provider: Provider, model: Scale
) -> None:
    provider.install(model, dtype=torch.float64)
    first, second = model.there, model.there
    assert first is not second and first.data_ptr() != second.data_ptr()
    assert isinstance(first, nn.Parameter) and first.requires_grad
    with torch.no_grad():
        first.mul_(3)
        model.count.add_(5)
    testing.assert_bit_equal(
        model.there, torch.arange(1.0, SIDE + 1, dtype=torch.float64, device=provider.device)
    )
    assert model.get_buffer("count").sum() == SIDE


def test_a_write_to_the_master_is_seen(provider: Provider, model: Scale) -> None:
    provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model.get_parameter("there").mul_(2)
    assert float(model.there.detach().sum()) == SIDE * (SIDE + 1)


def test_gradients_reach_them(provider: Provider, model: Scale) -> None:
    x = torch.ones(2, SIDE, dtype=torch.float64, device=provider.device)
    moved = testing.moved(model, provider.device, torch.float64)
    moved(x).square().sum().backward()
    expected = {name: p.grad.float() for name, p in moved.named_parameters() if p.grad is not None}
    provider.install(model, dtype=torch.float64)
    model(x).square().sum().backward()
    grad = model.get_parameter("there").grad
    assert grad is not None and grad.device == provider.device and grad.dtype == torch.float32
    testing.assert_bit_equal(grad, expected["there"])
    grad = model.get_parameter("here").grad
    assert grad is not None and grad.device.type == "cpu"
    testing.assert_bit_equal(grad, expected["here"].cpu())


def test_none_is_copied_from_the_host(provider: Provider, model: Scale) -> None:
    x = torch.ones(2, SIDE, dtype=torch.float64, device=provider.device)
    handle = provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert handle.stats().bytes_moved <= 3 * SIDE * 8  # only `here` is copied
