"""The budget bounds what is on the device; weights that stay there (residents) are part of it."""

from __future__ import annotations

import gc
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import BudgetError, testing
from dynswap_ext._python.residency import choose_residents
from sample_models import mlp

#: Wide enough for each layer to be copied by itself (a group).
WIDTH, LAYERS = 768, 8
#: Bytes of one layer (weight and bias) and of the whole model in float64, and what alignment may add.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
MODEL = LAYERS * LAYER
SLACK = LAYERS * 4096


def model_of_layers() -> nn.Sequential:
    return mlp(WIDTH, LAYERS).eval()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_residents_save_copies_and_stay_within_the_budget(provider: Provider, share: float) -> None:
    model = model_of_layers()
    budget = int(MODEL * share) + LAYER + SLACK
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        passes = 5
        for _ in range(passes):
            testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert MODEL <= stats.weight_bytes <= MODEL + SLACK
    assert stats.peak_bytes <= budget
    assert stats.overflow_bytes == 0
    # All but residents move in each pass. Bytes are counted in the masters' dtype, half of the device's.
    streamed = (stats.weight_bytes - stats.resident_bytes) // 2
    ahead = 3 * LAYER // 2 if provider.native else 0  # prefetched for a pass that does not come
    assert 0 < stats.bytes_moved <= passes * streamed + ahead
    if not provider.native:
        assert stats.resident_bytes >= budget - 2 * LAYER - SLACK
        assert stats.bytes_moved == passes * streamed


def test_a_budget_that_holds_everything_moves_everything_once(provider: Provider) -> None:
    model = model_of_layers()
    _, handle = provider.pair(model, budget="1GiB")
    with torch.no_grad():
        for _ in range(4):
            model(provider.randn(2, WIDTH))
    stats = handle.stats()
    assert stats.bytes_moved == MODEL // 2
    assert stats.resident_bytes == stats.weight_bytes


def test_the_minimum_is_what_prefetch_needs(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget="minimum", prefetch=2)
    assert handle.budget is None and not handle.automatic
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert stats.resident_groups == stats.resident_bytes == stats.overflow_bytes == 0
    assert stats.bytes_moved == MODEL // 2  # all of it, in the masters' dtype
    at_once = 3 if provider.native else 1
    assert LAYER <= stats.peak_bytes <= at_once * LAYER + SLACK


@pytest.mark.filterwarnings("ignore:the budget of:dynswap_ext.DynswapWarning")  # of weight and bias at a time
def test_too_small_a_budget_says_what_would_do(provider: Provider) -> None:
    model = model_of_layers()
    with pytest.raises(BudgetError) as raised:
        provider.install(model, dtype=torch.float64, budget=100)
    smallest = raised.value.smallest_bytes
    assert WIDTH * WIDTH * 8 <= smallest <= LAYER + SLACK
    assert str(smallest) in str(raised.value)
    with pytest.raises(BudgetError):
        provider.install(model, dtype=torch.float64, budget=smallest - 1)
    moved, handle = provider.pair(model, budget=smallest)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved > 0


def test_kept_tensors_overflow_with_one_warning(provider: Provider) -> None:
    model = model_of_layers()
    moved, _ = provider.pair(model, budget=3 * LAYER + SLACK)
    handle = provider.handles[-1]
    x = provider.randn(2, WIDTH)
    with pytest.warns(dynswap_ext.DynswapWarning) as caught:
        kept = [model[2 * i].weight for i in range(LAYERS)]
        testing.assert_bit_equal(model(x).detach(), moved(x).detach())
    assert len(caught) == 1
    assert re.search(r"\b\d+\.weight", str(caught[0].message))
    assert handle.stats().overflow_bytes > 0
    assert handle.stats().live_leases > 0
    for i, weight in enumerate(kept):
        testing.assert_bit_equal(weight.detach(), moved[2 * i].weight.detach(), f"kept weight {i}")
    del kept, weight


def test_beyond_the_minimum_nothing_is_said(provider: Provider) -> None:
    model = model_of_layers()
    handle = provider.install(model, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [model[2 * i].weight for i in range(LAYERS)]
    native = handle.provider == "native"  # pure Python has no arena, so its minimum is no limit
    assert (handle.stats().overflow_bytes > 0) == native
    del kept


@pytest.mark.slow
def test_an_overflow_is_the_most_at_one_time(provider: Provider) -> None:
    model, budget = model_of_layers(), 3 * LAYER + SLACK
    provider.pair(model, budget=budget)
    handle = provider.handles[-1]

    def keep_all() -> dynswap_ext.Stats:
        kept = [model[2 * i].weight for i in range(LAYERS)]
        stats = handle.stats()
        del kept
        gc.collect()
        return stats

    with pytest.warns(dynswap_ext.DynswapWarning):
        first = keep_all().overflow_bytes
    assert (LAYERS - 4) * LAYER <= first <= LAYERS * LAYER
    for _ in range(3):
        stats = keep_all()
        assert stats.overflow_bytes <= first + LAYER  # a slot more may be held by what comes next
        assert stats.peak_bytes <= budget + stats.overflow_bytes
    handle.reset_stats()
    assert handle.stats().overflow_bytes <= first
    provider.install(model, dtype=torch.float64, budget=budget + first + LAYER)
    handle = provider.handles[-1]
    assert keep_all().overflow_bytes == 0


def test_a_strict_budget_raises_and_leaves_the_model_usable(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=3 * LAYER + SLACK, strict_budget=True)
    kept = []
    with pytest.raises(BudgetError, match="strict_budget"):
        kept += [model[2 * i].weight for i in range(LAYERS)]
    with pytest.raises(BudgetError, match="strict_budget"):
        for i in range(LAYERS):
            kept.append(model[2 * i].weight)
    kept.clear()
    gc.collect()
    x = provider.randn(2, WIDTH)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().overflow_bytes == 0


def test_a_strict_budget_names_one_that_has_room(provider: Provider) -> None:
    model, budget = model_of_layers(), 3 * LAYER + SLACK
    for _ in range(LAYERS):
        handle = provider.install(model, budget=budget, strict_budget=True)
        kept: list[torch.Tensor] = []
        try:
            kept.extend(model[2 * i].weight for i in range(LAYERS))
        except BudgetError as error:
            assert f"({error.smallest_bytes} bytes)" in str(error)
            assert budget < error.smallest_bytes <= (len(kept) + 3) * (LAYER + SLACK)
            budget = error.smallest_bytes
        else:
            break
        finally:
            del kept
            handle.uninstall()
    else:
        pytest.fail("the budgets that the errors named never had room for all layers")
    assert budget <= (LAYERS + 2) * (LAYER + SLACK)


@pytest.mark.parametrize("layers", [3, 5, 7])
def test_residents_make_room_for_what_is_kept(provider: Provider, layers: int) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=layers * LAYER + SLACK, strict_budget=True)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for index in range(LAYERS):
            kept = model[2 * index].weight
            testing.assert_bit_equal(model(x), moved(x))
            testing.assert_bit_equal(kept.detach(), moved[2 * index].weight.detach())
            del kept
    assert handle.stats().overflow_bytes == 0


@pytest.mark.filterwarnings("ignore:the budget is:dynswap_ext.DynswapWarning")
def test_both_providers_refuse_a_budget_in_the_same_words(provider: Provider) -> None:
    with pytest.raises(BudgetError) as raised:
        provider.install(mlp(64, 3), dtype=torch.float64, budget=1)
    words = "a budget of 1 byte cannot hold the largest group of weights; the smallest budget that works is "
    assert str(raised.value).startswith(words)
    with pytest.raises(BudgetError) as raised:
        provider.install(mlp(64, 3), dtype=torch.float64, budget=1, keep=["4.bias", "0.weight"])
    words = "a budget of 1 byte does not hold the weights that keep= names (0.weight, 4.bias), which take "
    assert str(raised.value).startswith(words)
    assert "bytes), and the largest group of the others; the smallest budget that works is " in str(
        raised.value
    )


def test_a_plan_follows_the_sizes_of_masters(provider: Provider) -> None:
    model = mlp(WIDTH, 3)
    handle = provider.install(model, dtype=torch.float64, budget="1GiB")
    x, rows = provider.randn(2, WIDTH), 2 * WIDTH
    with torch.no_grad():
        model(x)
        before = handle.stats().weight_bytes
        model.get_parameter("4.weight").data = torch.ones(rows, WIDTH)
        model.get_parameter("4.bias").data = torch.ones(rows)
        for _ in range(5):
            model(x)
    assert before + LAYER - SLACK <= handle.stats().weight_bytes <= before + LAYER + SLACK


def test_budget_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("too small", 42)))
    assert (str(error), error.smallest_bytes) == ("too small", 42)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 20_000), st.integers(0, 3000))
def test_residents_and_the_largest_weight_fit(sizes: list[int], budget: int, together: int) -> None:
    assume(budget >= max(sizes))
    chosen = choose_residents(sizes, budget, together)
    resident = sum(size for size, taken in zip(sizes, chosen, strict=True) if taken)
    streamed = [size for size, taken in zip(sizes, chosen, strict=True) if not taken]
    assert resident + max(streamed, default=0) <= budget
    assert not streamed or not resident or resident + together <= budget
    assert streamed == [] or sum(sizes) > budget


def test_what_the_budget_has_room_for_is_no_overflow(provider: Provider) -> None:
    """A second copy of a weight that a graph holds is no overflow if the budget has room for it.

    The master is written while the graph holds its copy, so the new copy is outside the arena.
    """
    model = mlp(64, 6)
    moved, handle = provider.pair(model, budget="1GiB", strict_budget=True)
    x = provider.randn(2, 64)
    kept = [of(x) for of in (model, moved) for _ in range(2)]
    for of in (model, moved):
        with torch.no_grad():
            of.get_parameter("2.weight").mul_(2)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().overflow_bytes == 0
    assert handle.stats().peak_bytes <= 1 << 30
    del kept
