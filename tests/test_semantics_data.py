"""Writes through `.data`, which has a version counter of its own, reach the master."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pretend_cuda
from conftest import Provider
from dynswap_ext import testing

ROWS = 40
BUDGETS = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


class Cache(nn.Module):
    """A buffer and a weight. A forward may write a row of them that no sample looks at."""

    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, 8))
        self.register_buffer("cache", torch.randn(ROWS, 8))
        self.write = write

    def forward(self, x: torch.Tensor, row: int = 0) -> torch.Tensor:
        if self.write == "attribute":
            self.cache.data[row, 1:3] = 7.0
            self.weight.data[row, 1:3] = 7.0
        elif self.write == "name":
            cache, weight = self.cache, self.weight
            cache.data[row, 1:3] = 7.0
            weight.data[row, 1:3] = 7.0
        return x @ self.weight.t() @ self.cache


def written(model: nn.Module, *rows: int) -> dict[str, torch.Tensor]:
    """Return the state that is expected after these rows were written."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for value in state.values():
        for row in rows:
            value[row, 1:3] = 7.0
    return state


@BUDGETS
def test_of_a_tensor_that_is_kept(provider: Provider, budget: str | None) -> None:
    model = Cache()
    provider.pair(model, budget=budget)
    expected = written(model, 3, 5)
    kept = [model.cache, model.weight]
    for tensor in kept:
        tensor.data[3, 1:3] = 7.0
        tensor.detach().data[5, 1:3] = 7.0
    testing.assert_bit_equal(model.state_dict(), expected, "state while they live")
    expected = written(model, 9)
    for tensor in kept:
        tensor.data[9, 1:3] = 7.0
    del kept, tensor
    gc.collect()
    testing.assert_bit_equal(model.state_dict(), expected, "state afterwards")


@BUDGETS
def test_through_an_alias_that_is_kept_over_calls(provider: Provider, budget: str | None) -> None:
    model = Cache()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    aliases = [(m.cache.data, m.weight.data) for m in (model, moved)]
    with torch.no_grad():
        for row in (3, 5, 9):
            expected = written(model, row)
            for cache, weight in aliases:
                cache[row, 1:3] = 7.0
                weight[row, 1:3] = 7.0
            if row != 5:  # whichever looks first
                testing.assert_bit_equal(model.state_dict(), expected, "state")
            testing.assert_bit_equal(model(x), moved(x), "output")
            testing.assert_bit_equal(model.state_dict(), expected, "state after the call")


@BUDGETS
@MODES
@pytest.mark.parametrize("write", ["attribute", "name"])
def test_inside_a_forward(provider: Provider, write: str, training: bool, budget: str | None) -> None:
    if write == "name" and not provider.native:
        pytest.skip("pure Python does not see `.data` of a tensor that outlives it, inside a forward")
    model = Cache(write).train(training)
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    with torch.no_grad():
        for row in (3, 5):
            expected = written(model, row)
            testing.assert_bit_equal(model(x, row), moved(x, row), "output")
            testing.assert_bit_equal(model.state_dict(), expected, "state")


def test_only_written_elements_lose_precision(provider: Provider) -> None:
    model = Cache()
    provider.install(model, dtype=torch.bfloat16)
    expected = written(model, 3)
    model.cache.data[3, 1:3] = 7.0
    model.weight.data[3, 1:3] = 7.0
    testing.assert_bit_equal(model.state_dict(), expected, "state")


@BUDGETS
def test_reading_writes_nothing(provider: Provider, budget: str | None) -> None:
    model = Cache()
    _, handle = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    with torch.no_grad():
        model(x)
        before = {name: (value, value._version) for name, value in model.state_dict(keep_vars=True).items()}
        for _ in range(2):
            assert model.weight.data.sum() != model.cache.data.sum()
            model(x)
    for name, value in model.state_dict(keep_vars=True).items():
        assert before[name][0] is value
        assert before[name][1] == value._version, f"{name} was written"
    if budget:
        assert handle.stats().copies <= 2


def test_a_later_change_of_the_master_wins(provider: Provider) -> None:
    model = Cache()
    provider.pair(model)
    alias = model.cache.data
    alias[3, 1:3] = 7.0
    with torch.no_grad():
        model._buffers["cache"].fill_(2.0)
    assert model.cache.unique().tolist() == [2.0]
    del alias
    gc.collect()
    assert model.cache.unique().tolist() == [2.0]
    assert model._buffers["cache"].unique().tolist() == [2.0]


@pytest.mark.skipif(not pretend_cuda.active(), reason="only the pretend device counts synchronisations")
def test_nothing_is_compared_where_nobody_took_it(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python compares what a view has outlived")
    model = Cache().eval()
    provider.pair(model, budget="1GiB")
    x = provider.randn(2, 8)
    with torch.no_grad():
        model(x)
        model.weight.data[0, 0] = 1.0
        for _ in range(3):
            model(x)
        provider.device_module.synchronize()
        before = pretend_cuda.counts()["synchronisations"]
        for _ in range(3):
            model(x)
    assert pretend_cuda.counts()["synchronisations"] == before


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("assign", ["in place", "another"])
@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_data_of_residents_is_set(provider: Provider, assign: str, strict: bool) -> None:
    """`.data` of weights that stay on the device can be set, as in peft's `merge_and_unload`."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    for p in model.parameters():
        p.data = torch.randint_like(p, -2, 3)
    moved, handle = provider.pair(model, budget=5 * 65 * 64 * 8 + 4096, strict_budget=strict)
    x = provider.randn(2, 64)
    with torch.no_grad():
        model(x)
        for m in (model, moved):
            for layer in m:
                if assign == "in place":
                    layer.weight.data += 1
                else:
                    layer.weight.data = layer.weight.data * 2
        testing.assert_bit_equal(model(x), moved(x), "output")
    if assign == "in place" or strict:
        assert handle.stats().overflow_bytes == 0


def set_a_part_through_data(w: torch.Tensor) -> None:
    w.data[:2] = 1.0


def add_through_data(w: torch.Tensor) -> None:
    w.data.add_(1)


def copy_through_data(w: torch.Tensor) -> None:
    w.data.copy_(torch.ones_like(w.data))


def add_in_place(w: torch.Tensor) -> None:
    w.add_(1)


def set_a_part(w: torch.Tensor) -> None:
    w[1:3] = 1.0


WAYS = [set_a_part_through_data, add_through_data, copy_through_data, add_in_place, set_a_part]


@BUDGETS
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", ["weight", "cache"])
def test_a_tensor_that_was_given_other_data_is_written(
    provider: Provider, way: Callable[[torch.Tensor], None], name: str, budget: str | None
) -> None:
    """A tensor that was given other data can be written to.

    peft's `add_weighted_adapter(combination_type="cat")` does so.
    """
    model = Cache()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    with torch.no_grad():
        for m in (model, moved):
            m(x)
            tensor = getattr(m, name)
            tensor.data = tensor.data * 0.0
            way(tensor)
            way(tensor)
        del tensor
        testing.assert_bit_equal(model(x), moved(x), "output")
    testing.assert_bit_equal(
        model.state_dict()[name], moved.state_dict()[name].to("cpu", torch.float32), "master"
    )


@BUDGETS
def test_a_name_that_is_kept_sees_other_data_that_was_set_through_another(
    provider: Provider, budget: str | None
) -> None:
    """A kept tensor sees data that was set through another read of the weight.

    peft's merge of several DoRA adapters needs that.
    """
    model = Cache()
    model.weight.data = torch.randint_like(model.weight, -2, 3)
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 8)
    for m in (model, moved):
        kept = m.weight
        for factor in (2, 3):
            m.weight.data = m.weight.data * factor
        assert m.weight is kept
        kept.data += 1
        del kept
    testing.assert_bit_equal(model(x), moved(x), "output")
    testing.assert_bit_equal(
        model.state_dict()["weight"], moved.state_dict()["weight"].to("cpu", torch.float32), "master"
    )


@BUDGETS
def test_a_parameter_is_thawed_while_what_was_given_other_data_is_held(
    provider: Provider, budget: str | None
) -> None:
    """A parameter may be thawed while a tensor with other data is held.

    The data have another layout, so a new plan is made between the thaw and the call.
    """
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.randn(8, 16)[:, ::2], requires_grad=False)
    moved, _ = provider.pair(model, budget=budget)
    x, held = provider.randn(2, 8), []
    for m, weight in ((model, model._parameters["weight"]), (moved, moved.weight)):
        held.append(m.weight)
        m.weight.data = torch.ones_like(m.weight)
        weight.requires_grad_()
    for _ in range(2):
        outputs = [m(x) for m in (model, moved)]
        testing.assert_bit_equal(*outputs, "output")
        for output in outputs:
            output.sum().backward()
    testing.assert_bit_equal(model.get_parameter("weight").grad, moved.weight.grad.to("cpu", torch.float32))
