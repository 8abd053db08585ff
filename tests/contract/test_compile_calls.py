"""`torch.compile(model)`: graphs call no module, yet each call of the model counts as a pass."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

pytestmark = pytest.mark.alone

WIDTH, LAYERS = 512, 8
#: Bytes of a layer in float64. Masters are cast to it so that they are streamed on the CPU, too.
LAYER = (WIDTH * WIDTH + WIDTH) * 8


@pytest.fixture
def native(provider: Provider) -> Provider:
    if not provider.native:
        pytest.skip("the graphs of pure Python convert masters themselves")
    torch._dynamo.reset()
    return provider


class Compiled:
    """An installed model with a compiled graph, and a moved copy to compare it with."""

    def __init__(self, provider: Provider, model: nn.Module, **options: object) -> None:
        self.model = model.eval().requires_grad_(False)
        self.moved = testing.moved(model, provider.device, torch.float64)
        self.handle = provider.install(self.model, dtype=torch.float64, **options)
        self.graphs = torch._dynamo.testing.CompileCounter()
        self._run = torch.compile(self.model, backend=self.graphs)
        self._x = provider.randn(2, WIDTH)

    def passes(self, count: int) -> None:
        for _ in range(count):
            testing.assert_bit_equal(self._run(self._x), self.moved(self._x))


def test_an_automatic_budget_is_measured(native: Provider) -> None:
    one = Compiled(native, mlp(WIDTH, LAYERS), budget="auto")
    one.passes(5)
    assert one.handle.tuning is not None and one.handle.tuning.passes == 2
    one.handle.reset_stats()
    one.passes(1)
    stats = one.handle.stats()
    assert stats.resident_groups == stats.groups and stats.bytes_moved == 0


def test_no_plan_compiles_again(native: Provider) -> None:
    one = Compiled(native, mlp(WIDTH, LAYERS), budget="auto")
    one.passes(5)
    one.handle.retune(6 * LAYER)
    one.passes(5)
    assert one.handle.budget == 6 * LAYER
    assert 0 < one.handle.stats().resident_bytes < 6 * LAYER
    with one.handle.release():
        assert one.handle.stats().resident_bytes == 0
    one.passes(2)
    one.handle.release()
    one.passes(2)  # which take the memory again
    assert one.handle.stats().resident_bytes > 0
    replaced = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
    layer, moved = linear(one.model, 3), linear(one.moved, 3)
    layer.weight, moved.weight = replaced, nn.Parameter(replaced.to(moved.weight), requires_grad=False)
    with torch.no_grad():
        layer.bias.add_(1)
        moved.bias.add_(1)
    one.passes(3)
    assert one.graphs.frame_count == 1


def linear(model: nn.Module, index: int) -> nn.Linear:
    return [each for each in model.modules() if isinstance(each, nn.Linear)][index]


class Tied(nn.Module):
    """A model that uses the weight of its first layer again in its last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, 4)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(x)))


def test_a_weight_that_is_used_twice(native: Provider) -> None:
    one = Compiled(native, Tied(), budget="auto")
    one.passes(6)
    assert one.handle.tuning is not None


def test_what_was_compiled_first_need_not_come_again(native: Provider) -> None:
    one = Compiled(native, mlp(WIDTH, LAYERS), budget="auto")
    part = torch.compile(one.model[-1].forward, backend="eager")  # without a call, too
    part(torch.ones(2, WIDTH, dtype=torch.float64, device=native.device))
    one.passes(12)
    assert one.handle.tuning is not None


def test_a_model_that_compiles_itself_is_called_as_any(native: Provider) -> None:
    model = mlp(WIDTH, LAYERS).eval().requires_grad_(False)
    moved = testing.moved(model, native.device, torch.float64)
    handle = native.install(model, dtype=torch.float64, budget="auto")
    model.compile(backend="eager")
    x = native.randn(2, WIDTH)
    for _ in range(5):
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.tuning is not None and handle.tuning.passes == 2
    assert dynswap_ext.is_installed(model)
