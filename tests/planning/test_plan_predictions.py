"""Predictions agree with arithmetic for simple models. Bad arguments are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import skip_or_fail
from dynswap_ext import _provider, checkpoint, planning
from dynswap_ext.errors import BudgetError, ConfigError

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def _native() -> None:
    if reason := _provider.native_unavailable(torch.device("cpu")):
        skip_or_fail(reason, cuda=False)


#: Seeds of models.
SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3)))
NIGHTLY_SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3)))


def layers(count: int = 40, *, seconds: float = 1e-3, moved: int = 8 * _MIB) -> list[planning.PlannedWeight]:
    """Return equal matrices of 8 MiB on the device, one per module."""
    return [
        planning.PlannedWeight(f"layers.{i}.weight", 8 * _MIB, moved, i, "matrix", 4 * _MIB, seconds=seconds)
        for i in range(count)
    ]


def predict(weights: list[planning.PlannedWeight], budget: int, **options: Any) -> planning.Prediction:
    options = {"bandwidth": 10e9, "latency": 0.0, **options}
    return planning.predict(weights, budgets=[budget], **options)[0]


def test_all_resident_takes_its_compute() -> None:
    found = predict(layers(), 320 * _MIB)
    assert found.seconds == pytest.approx(40e-3) and found.compute_seconds == pytest.approx(40e-3)
    assert found.resident_share == 1 and found.moved_bytes == 0 and found.stall_seconds == pytest.approx(0)
    assert found.to_limit == pytest.approx(1) and found.to_resident == pytest.approx(1) and found.hidden


def test_the_minimum_is_that_of_an_install() -> None:
    plan = planning.plan(layers(), budgets=["Minimum", "80MiB"], bandwidth=10e9)
    least = plan.minimum
    assert least is not None and least.budget == 3 * 8 * _MIB  # the one in use, and two ahead
    assert least.resident_bytes == 0 and least.resident_share == 0 and least.moved_bytes == 320 * _MIB
    assert plan.asked == (least.budget, 80 * _MIB) and plan.at("minimum") == least
    assert [found for found in plan.predictions if found.budget == least.budget] == [least]
    wider = planning.predict(layers(), budgets=["1GiB", "minimum"], bandwidth=10e9, prefetch=4)
    assert [found.budget for found in wider] == [1 << 30, 5 * 8 * _MIB]
    without = planning.plan(layers(), budgets=["80MiB"], bandwidth=10e9)
    assert without.minimum is None and without.hidden_from == plan.hidden_from


def test_a_slow_bus_takes_bytes_over_bandwidth() -> None:
    found = predict(layers(), 80 * _MIB, bandwidth=1e8, latency=0.01)
    streamed = 320 * _MIB * (1 - found.resident_share)
    assert 0 < found.resident_share < 0.25 and found.moved_bytes == pytest.approx(streamed)
    copies = streamed / (8 * _MIB)
    assert found.seconds == pytest.approx(streamed / 1e8 + copies * 0.01, rel=0.02)
    assert found.limit_seconds == pytest.approx(240 * _MIB / 1e8) and not found.hidden
    assert found.stall_seconds == pytest.approx(found.seconds - 40e-3, rel=0.02)


def test_compute_hides_copies_of_a_fast_bus() -> None:
    found = predict(layers(), 40 * _MIB, bandwidth=100e9)
    assert found.resident_share < 0.2 and found.hidden
    assert found.seconds == pytest.approx(40e-3, rel=0.01)


def uneven(seed: int, scale: float = 1.0) -> list[planning.PlannedWeight]:
    """Return modules of several sizes, whose compute does not depend on their bytes."""
    drawn = random.Random(seed)
    sizes = [(unit, drawn.choice([1, 2, 4, 8])) for unit in range(drawn.randint(8, 30))]
    times = [scale * drawn.choice([0, 1e-4, 1e-3, 4e-3]) for _ in sizes]
    return [
        planning.PlannedWeight(f"{u}.w", n := int(scale * size * _MIB), n, u, "matrix", n // 4, seconds=time)
        for (u, size), time in zip(sizes, times, strict=True)
    ]


@pytest.mark.parametrize("seed", NIGHTLY_SEEDS)
def test_a_prediction_is_of_its_budget_alone(seed: int) -> None:
    """A prediction depends only on its budget, not on others that are asked for, or on their order."""
    weights = uneven(seed)
    plan = planning.plan(weights, bandwidth=2e9)
    curve = plan.curve(30)
    assert len(curve) >= 30 and curve[0].seconds > 1.1 * curve[-1].seconds
    assert all(found.resident_bytes <= found.budget for found in curve)
    for found in curve[::5]:
        assert [found] == planning.predict(weights, budgets=[found.budget], bandwidth=2e9)
    assert [plan.at(found.budget) for found in plan.predictions] == list(plan.predictions)
    budgets = [found.budget for found in reversed(curve)]
    assert planning.predict(weights, budgets=budgets, bandwidth=2e9) == curve[::-1]
    wider = planning.plan(weights, budgets=budgets, bandwidth=2e9)
    assert wider.predictions == tuple(curve) and wider.hidden_from == plan.hidden_from
    assert_placed(curve)


def assert_placed(curve: Sequence[planning.Prediction]) -> None:
    """Assert that twice the budget is never slower, that the limit falls, and that no pass beats it."""
    for less, more in pairwise(curve):
        assert less.budget < more.budget and more.limit_seconds <= less.limit_seconds
    for less in curve:
        assert less.seconds >= less.limit_seconds * (1 - 1e-9)
        for more in curve:
            assert more.budget < 2 * less.budget or more.seconds <= less.seconds * (1 + 1e-9)


_KINDS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda _: 16 * _MIB,
    "mixed": lambda drawn: drawn.randint(1024, 64 * _MIB),
    "large and tiny": lambda drawn: drawn.choice([4096, 80 * _MIB]),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("count", [3, 8, 20])
@pytest.mark.slow
def test_plans_of_many_shapes(kind: str, count: int) -> None:
    drawn = random.Random(f"{kind} {count}")
    sizes = [_KINDS[kind](drawn) for _ in range(count)]
    pace = 2 * drawn.choice([0.1, 1, 2]) / 25e9  # the compute of a weight against its copy
    weights = [
        planning.PlannedWeight(f"{i}.w", n, n, i, "matrix", n // 4, seconds=pace * drawn.random() * n)
        for i, n in enumerate(sizes)
    ]
    plan = planning.plan(weights, bandwidth=25e9)
    assert_placed(plan.predictions)
    assert_placed(plan.curve(8))
    assert plan.at(plan.hidden_from).hidden


@pytest.mark.parametrize("latency", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_faster_than_the_limit(seed: int, latency: float) -> None:
    plan = planning.plan(uneven(seed, 1 / 64), bandwidth=1e9, latency=latency)
    for found in plan.curve(10):
        assert found.to_limit >= 1 - 1e-9
        held = (sum(weight.nbytes for weight in plan.weights) - found.budget) / 1e9
        assert found.limit_seconds == pytest.approx(max(found.compute_seconds, held))


def test_texts_mean_what_numbers_do() -> None:
    weights = layers()
    plan = planning.plan(weights, budgets=["100MiB", "1KiB"], shares=["1/2"], bandwidth="4GB/s")
    same = planning.plan(weights, budgets=[100 * _MIB, 160 * _MIB, 1024], bandwidth=4e9)
    assert plan == same and plan.asked == (100 * _MIB, 160 * _MIB) and plan.too_small == (1024,)
    assert plan.at("100MiB") == same.at(100 * _MIB)
    predicted = planning.predict(weights, shares=["31.25%"], bandwidth="4GB/s")
    assert predicted == planning.predict(weights, shares=[0.3125], bandwidth="4GB/s")
    assert predicted == planning.predict(weights, budgets=[100 * _MIB], bandwidth=4e9)
    machine = planning.ASSUMED.with_rates(bandwidth="25GB/s", arithmetic="1PFLOPS", latency="2us")
    assert machine.bandwidth == 25e9 and machine.arithmetic == 1e15 and machine.latency == pytest.approx(2e-6)
    assert machine.memory == planning.ASSUMED.memory == planning.ASSUMED.with_rates().memory


def test_a_cast_moves_the_masters_bytes() -> None:
    same = predict(layers(), 80 * _MIB, bandwidth=1e9)
    half = predict(layers(moved=4 * _MIB), 80 * _MIB, bandwidth=1e9)
    assert half.resident_share == same.resident_share
    assert half.moved_bytes == pytest.approx(same.moved_bytes / 2)
    assert half.seconds == pytest.approx(same.seconds / 2, rel=0.02)


class TestPlan:
    def test_the_sweep_has_the_ends_and_what_was_asked_for(self) -> None:
        plan = planning.plan(layers(), budgets=[100 * _MIB, 1, 100 * _MIB], bandwidth=4e9)
        assert plan.smallest == 8 * _MIB and plan.all == 320 * _MIB
        assert plan.asked == (100 * _MIB,) and plan.too_small == (1,)
        budgets = [prediction.budget for prediction in plan.predictions]
        assert budgets == sorted(set(budgets)) and 100 * _MIB in budgets
        assert budgets[0] == plan.smallest and budgets[-1] == plan.all and 160 * _MIB in budgets
        assert plan.predictions[0].resident_share == 0 and plan.predictions[-1].resident_share == 1

    @pytest.mark.parametrize("nbytes", [32, 1000, 4224, 8448])
    def test_small_models_have_a_plan_for_every_budget(self, nbytes: int) -> None:
        """Small models, which are padding to a large part, have a plan for every budget."""
        weights = [
            planning.PlannedWeight(f"{i}.{name}", nbytes, nbytes, i, "matrix", nbytes // 4, seconds=1e-6)
            for i in range(12)
            for name in ("weight", "bias")
        ]
        found = planning.plan(weights, bandwidth=1e9)
        assert found.predictions[-1].budget == found.all >= 24 * nbytes
        assert all(p.resident_bytes <= p.budget for p in found.predictions)

    def test_the_smallest_budget_is_the_engines(self) -> None:
        plan = planning.plan(layers(), bandwidth=4e9)
        assert plan.at(plan.smallest).budget == plan.smallest
        with pytest.raises(BudgetError) as caught:
            plan.at(plan.smallest - 1)
        assert caught.value.smallest_bytes == plan.smallest

    def test_copies_are_hidden_from_where_arithmetic_says(self) -> None:
        # A pass computes for 40 ms, in which 160 of 320 MiB arrive. The ring takes some of the budget.
        plan = planning.plan(layers(), bandwidth=160 * _MIB / 40e-3, latency=0.0)
        assert 160 * _MIB <= plan.hidden_from <= 160 * _MIB + 4 * 8 * _MIB
        assert plan.at(plan.hidden_from).hidden

    def test_copies_hidden_always_or_never(self) -> None:
        always = planning.plan(layers(seconds=1.0), bandwidth=10e9)
        assert always.hidden_from == always.smallest  # a copy takes 0.8 ms of a layer's second
        never = planning.plan(layers(seconds=0.0), bandwidth=10e9)
        assert never.hidden_from == never.all
        assert math.isinf(never.predictions[0].to_resident) and never.predictions[-1].to_resident == 1

    def test_one_small_weight(self) -> None:
        plan = planning.plan([planning.PlannedWeight("w", 3, 3, 0, "vector", 3)], bandwidth=1e9)
        assert plan.smallest <= plan.all and plan.predictions[-1].resident_share == 1


class TestCompute:
    MACHINE = planning.Machine("m", bandwidth=1e9, arithmetic=1e12, memory=1e10)

    def seconds(self, kind: Any, rows: int, share: float = 1.0) -> float:
        weight = planning.PlannedWeight("w", 2000, 2000, 0, kind, 1000, share=share)
        return planning.timed([weight], self.MACHINE, rows=rows)[0].seconds

    def test_by_hand(self) -> None:
        assert self.seconds("matrix", 1) == pytest.approx(2000 / 1e10)  # bound by the device's memory
        assert self.seconds("matrix", 10_000) == pytest.approx(2 * 1000 * 10_000 / 1e12)
        assert self.seconds("matrix", 10_000, share=0.25) == pytest.approx(2 * 1000 * 2500 / 1e12)
        assert self.seconds("once", 10_000) == self.seconds("matrix", 1)
        assert self.seconds("lookup", 10_000) == 0
        assert self.seconds("vector", 10_000) == pytest.approx(2000 / 1e10)
        assert self.seconds("norm", 10) == pytest.approx((2000 + 2 * 10 * 2000) / 1e10)

    def test_a_given_time_is_spread_by_operations(self) -> None:
        sizes = {"matrix": 300, "lookup": 999, "vector": 50}
        weights = [planning.PlannedWeight(k, n, n, i, k, n) for i, (k, n) in enumerate(sizes.items())]  # type: ignore[arg-type]
        weights.append(planning.PlannedWeight("m", 100, 100, 3, "matrix", 100))
        assert [w.seconds for w in planning.spread(weights, 8.0)] == [6.0, 0.0, 0.0, 2.0]
        vectors = [planning.PlannedWeight("v", n, n, 0, "vector", n) for n in (1, 3)]
        assert [w.seconds for w in planning.spread(vectors, 8.0)] == [2.0, 6.0]

    def test_rows_to_hide(self) -> None:
        weights = [planning.PlannedWeight("w", 2000, 2000, 0, "matrix", 1000)]
        rows = planning.rows_to_hide(weights, self.MACHINE, 2e-3)
        assert rows == pytest.approx(1_000_000, rel=0.02)
        table = [planning.PlannedWeight("w", 2000, 2000, 0, "lookup", 1000)]
        assert planning.rows_to_hide(table, self.MACHINE, 2e-3) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": []}, "no weights to plan for"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0"),
        ({"bandwidth": math.nan}, "bandwidth is nan"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"budgets": [0]}, "a budget is 0"),
        ({"budgets": [0.5]}, "a budget is 0.5"),
        ({"budgets": ["50%"]}, r"share of the device's free memory; .* shares="),
        ({"shares": [1.5]}, "1.5 is not a share of the model"),
        ({"budgets": ["6 apples"]}, "'6 apples' is not a size"),
        ({"bandwidth": "25"}, "'25' is not a bandwidth"),
        ({"weights": layers(1, seconds=math.inf)}, "layers.0.weight"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"weights": layers(), "budgets": [80 * _MIB], "bandwidth": 1e9, **change}
    with pytest.raises(ConfigError, match=said):
        planning.predict(options.pop("weights"), **options)


def test_rows_and_times_are_checked() -> None:
    with pytest.raises(ConfigError, match="rows is 0"):
        planning.timed(layers(), planning.ASSUMED, rows=0)
    with pytest.raises(ConfigError, match="arithmetic of the machine is 0"):
        planning.timed(layers(), planning.Machine("m", 1.0, 0.0, 1.0))
    with pytest.raises(ConfigError, match="expected seconds"):
        planning.spread(layers(), -1.0)


def test_without_the_extension_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = _provider._Extension(None, "the extension is not built", {})
    monkeypatch.setattr(_provider, "_extension", lambda: gone)
    with pytest.raises(ConfigError, match=r"native extension.*dynswap info"):
        planning.predict(layers(), budgets=[80 * _MIB], bandwidth=1e9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(300, 200, 2),
        lambda: nn.GRU(300, 200, bidirectional=True),
        lambda: nn.MultiheadAttention(300, 4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(300, 200)),
    ],
    ids=["lstm", "gru", "attention", "weight norm"],
)
@pytest.mark.parametrize("of", ["model", "checkpoint"])
@pytest.mark.slow
def test_the_smallest_budget_holds_what_one_call_needs(
    of: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(*(make() for _ in range(3)))
    if of == "model":
        outline = planning.outline_of_model(model)
    else:
        checkpoint.save(model, tmp_path / "model.safetensors")
        outline = planning.outline_of_checkpoint(tmp_path / "model.safetensors")
    each = sum(p.nbytes for p in model[0].parameters())
    smallest = planning.plan(outline.weights, bandwidth=1e9).smallest
    assert each <= smallest < each + 8192 * len(list(model[0].parameters()))
