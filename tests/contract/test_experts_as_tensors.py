"""A fused parameter whose slices are fetched one by one can be used like any tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conftest import PRETEND, Provider
from dynswap_ext import testing

DTYPE = None if PRETEND else torch.float64
EXPERTS, OUT, IN = 16, 24, 32
Use = Callable[[Any, Tensor], Tensor]


class Used(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.other = nn.Parameter(torch.randn(EXPERTS, OUT, IN))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


@pytest.fixture(autouse=True)
def only_native(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches fused experts whole")


def both(provider: Provider, use: Use, *, frozen: bool = False) -> tuple[Any, Any]:
    """Install a model with room for one of its two parameters; return it and a moved copy."""
    model = Used(use).requires_grad_(not frozen)
    moved = testing.moved(model, provider.device, DTYPE)
    budget = 5 * moved.up.nbytes // 4
    provider.install(model, dtype=DTYPE, budget=budget)
    return model, moved


def _fill(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.up[0:2].zero_()
        model.up[5:6].fill_(1)
        model.up[8::4].mul_(2)
    return x @ model.up[9].T


@pytest.mark.parametrize("frozen", [False, True])
def test_a_range_is_a_view(provider: Provider, frozen: bool) -> None:
    model, moved = both(provider, _fill, frozen=frozen)
    x = provider.randn(3, IN, dtype=DTYPE or torch.float32)
    for _ in range(2):
        testing.assert_bit_equal(model(x), moved(x))
    up = model.get_parameter("up").detach()
    testing.assert_bit_equal(up.to(moved.up), moved.up.detach())


CHECKPOINTED: dict[str, Use] = {
    "one": lambda m, x: (x @ m.up[3].T).sin(),
    "several": lambda m, x: (x @ m.up[[4, 4, 7]].mT).sum(0).sin(),
    "a loop": lambda m, x: sum((x @ m.up[i].T).sin() for i in torch.tensor([1, 4, 5])),  # type: ignore[misc]
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_part_of_a_forward_is_checkpointed(provider: Provider, name: str) -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        part = checkpoint(lambda z: CHECKPOINTED[name](model, z), x, use_reentrant=False)
        assert isinstance(part, Tensor)
        return part

    model, moved = both(provider, use)
    for step in range(2):
        x = provider.randn(3, IN, dtype=DTYPE or torch.float32, seed=step)
        losses = []
        for each in (model, moved):
            each.zero_grad()
            own = x.clone().requires_grad_()
            each(own).sum().backward()
            losses.append(own.grad)
        testing.assert_bit_equal(losses[0], losses[1], f"step {step}")
        gradient = model.get_parameter("up").grad
        testing.assert_bit_equal(gradient, moved.up.grad.to(gradient), f"step {step}")


FUNCTIONAL: dict[str, Use] = {
    "an index": lambda m, x: torch.func.vmap(lambda r, i: r @ m.up[i].T)(x, torch.arange(3).to(x.device)),
    "a list": lambda m, x: torch.func.vmap(lambda r: r @ m.up[[3, 4]].sum(0).T)(x),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_vmap(provider: Provider, name: str) -> None:
    model, moved = both(provider, FUNCTIONAL[name], frozen=True)
    x = provider.randn(3, IN, dtype=DTYPE or torch.float32)
    testing.assert_bit_equal(model(x), moved(x))


def test_what_it_says_of_itself(provider: Provider) -> None:
    seen: list[Any] = []

    def use(model: Any, x: Tensor) -> Tensor:
        weights = (model.up, model.up.mT, model.up.transpose(1, 2))
        seen.extend((w.shape, w.stride(), w.is_contiguous(), w.device, w.dtype) for w in weights)
        for wrong in (lambda: model.up.transpose(1, 7), lambda: model.up[::-1], lambda: model.up[99]):
            with pytest.raises((IndexError, ValueError)):
                wrong()
        return x

    for model in both(provider, use):
        model(provider.randn(1, IN, dtype=DTYPE or torch.float32))
    assert seen[:3] == seen[3:]


def test_a_hook_in_a_forward_is_refused(provider: Provider) -> None:
    def use(model: Any, x: Tensor) -> Tensor:
        model.up.register_hook(lambda gradient: None)
        return x

    model, _ = both(provider, use)
    with pytest.raises(RuntimeError, match="Register the hook on the model's parameter"):
        model(provider.randn(1, IN, dtype=DTYPE or torch.float32))
