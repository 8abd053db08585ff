"""Masters that are views of one storage: what is written on one shows in the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the same": lambda t: t.view(t.shape),
    "transposed": lambda t: t.t(),
    "flat": lambda t: t.reshape(-1),
    "rows": lambda t: t[2:6],
    "columns": lambda t: t[:, 2:6],
    "diagonal": lambda t: t.diagonal(),
    "another dtype": lambda t: t.view(torch.int32),
}


class Views(nn.Module):
    """A buffer and a view of it: two masters in one storage."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        table = torch.arange(64.0).reshape(8, 8)
        self.register_buffer("whole", table)
        # `.data` has a version counter of its own, as tensors from a checkpoint have.
        self.register_buffer("part", view(table).data)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("view", VIEWS)
def test_different_views_of_one_storage(provider: Provider, view: str, budget: str | None) -> None:
    model = Views(VIEWS[view])
    handle = provider.install(model, dtype=torch.float64, budget=budget)

    def expected(name: str) -> torch.Tensor:
        master = model._buffers[name]
        return master.to(provider.device, torch.float64 if master.is_floating_point() else None)

    def check() -> None:
        for name in ("whole", "part"):
            testing.assert_bit_equal(getattr(model, name), expected(name), name)

    check()
    with torch.no_grad():
        model._buffers["whole"].mul_(2)  # the view changes, and its version does not
        check()
        model._buffers["part"].zero_()
        check()
        model.whole.fill_(5)  # through the attribute
        check()
    assert model._buffers["part"].unique().numel() == 1
    handle.uninstall()
    assert model.part.untyped_storage().data_ptr() == model.whole.untyped_storage().data_ptr()


def test_parameters_that_are_views_get_gradients_of_their_own(provider: Provider) -> None:
    storage = torch.randn(8, 8)
    model = nn.Module()
    model.upper, model.lower = nn.Parameter(storage[:6]), nn.Parameter(storage[2:])
    moved, _ = provider.pair(model)
    for m in (model, moved):
        (m.upper.square().sum() + m.lower.pow(3).sum()).backward()
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        testing.assert_bit_equal(p.grad, q.grad.to("cpu", torch.float32))


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_row_that_is_written_on_one_large_buffer(provider: Provider, budget: str | None) -> None:
    """A row that is written on one of two large buffers in the same memory is seen in the other.

    Neither the other's version nor a sample of its bytes shows the write.
    """
    model = nn.Module()
    model.register_buffer("whole", torch.zeros(300, 300))
    model.register_buffer("alias", model.whole.data)
    provider.install(model, dtype=torch.float64, budget=budget)
    with torch.no_grad():
        before = model.alias.sum()
        model.whole[7] = 2
        assert before == 0 and model.alias.sum() == 600
