"""The autograd nodes that the uses of a weight share: which graphs they are in, how gradients are added."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import Provider
from dynswap_ext import testing


class SavedUntil:
    """What a graph keeps of a tensor; calls a function when the graph lets go of it."""

    def __init__(self, tensor: Tensor, at_end: Callable[[], object]) -> None:
        self.tensor, self.at_end = tensor, at_end

    def __del__(self) -> None:
        self.at_end()


def test_a_model_is_called_while_an_older_graph_is_taken_apart(provider: Provider) -> None:
    """The node of the bias is on torch's list of what is to be destroyed when the model is called again."""
    model = nn.Linear(8, 8)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 8).requires_grad_()

    def step(of: nn.Module) -> None:
        later: list[Tensor] = []

        def call_again() -> None:
            if not later:
                later.append(of(torch.ones_like(x)))

        def saved(tensor: Tensor) -> SavedUntil:
            return SavedUntil(tensor, call_again)

        with torch.autograd.graph.saved_tensors_hooks(saved, lambda kept: kept.tensor):
            before = x.sin()
        out = of(before)
        del before, out
        assert later
        later[0].sum().backward()

    step(moved)
    step(model)
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.to("cpu", torch.float32))


class Used(nn.Module):
    """Reads its weight so many times, and uses what it got so often each time."""

    def __init__(self, uses: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for times in self.uses:
            weight: Any = self.weight
            for _ in range(times):
                x = torch.tanh(F.linear(x, weight))
            del weight
        return x


@pytest.mark.parametrize("uses", list(itertools.product((1, 2, 3), repeat=3)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_gradients_of_all_uses_are_added_as_without_an_install(
    provider: Provider, uses: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not provider.native and max(uses) > 1:
        pytest.skip("in pure Python the gradients of one read are added first")
    model = nn.Sequential(Used(uses), nn.Linear(8, 8))
    moved, _ = provider.pair(model, dtype=dtype)
    x = provider.randn(3, 8, dtype=dtype)
    moved(moved(x)).sum().backward()
    model(model(x)).sum().backward()
    for master, expected in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None
        testing.assert_bit_equal(master.grad, expected.grad.to("cpu", torch.float32))
