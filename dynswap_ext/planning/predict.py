"""Predictions: what a pass takes at each budget, and from which budget on copies are hidden.

The engine itself answers, on a virtual clock: nothing here knows how it groups weights or places residents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from dynswap_ext._provider import native_extension
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import MINIMUM, is_named
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.units import parse_bandwidth, parse_planned, parse_share
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.rates import ASSUMED
from dynswap_ext.planning.weights import PlannedWeight

#: Shares of the model that a plan looks at in addition to what is asked for.
_SHARES: Final = (0.10, 0.25, 0.50, 0.75, 0.90)
#: Copies are hidden where a pass takes at most so much of its compute.
_HIDDEN: Final = 1.01
#: Of the virtual clock. The first half is warm-up: it learns the order, and the next begins with a full ring.
_PASSES: Final = 6
#: With experts: so many divided by the part of them that a pass uses, up to a limit. Each is then used often
#: enough to show which stay.
_PASSES_BY_USE: Final = 8
_MOST_PASSES: Final = 160


@dataclass(frozen=True)
class Prediction:
    """One budget's pass in the steady state. Bytes are bytes; times are seconds."""

    budget: int
    #: Of all weights, by device bytes: 0 to 1.
    resident_share: float
    resident_bytes: int
    #: What a pass moves to the device.
    moved_bytes: float
    seconds: float
    #: Of the pass with all weights resident.
    compute_seconds: float
    #: What the bus needs for what a pass moves: the streamed weights, or fewer if some stay in the arena.
    copy_seconds: float
    #: No order of copies is faster: the compute, or the copies of the weights that the budget cannot hold.
    limit_seconds: float
    #: The compute waited for copies.
    stall_seconds: float
    #: Groups whose copy began only when they were needed.
    misses: float
    groups: int
    #: Groups that the arena holds ahead of the one in use.
    depth: int

    @property
    def to_limit(self) -> float:
        """Time over the limit, 1 at least."""
        return self.seconds / self.limit_seconds if self.limit_seconds > 0 else 1.0

    @property
    def to_resident(self) -> float:
        """Time over that of the model all resident; infinite where that takes none."""
        if self.compute_seconds > 0:
            return self.seconds / self.compute_seconds
        return math.inf if self.seconds > 0 else 1.0

    @property
    def hidden(self) -> bool:
        """Whether compute hides the copies."""
        return self.seconds <= _HIDDEN * self.compute_seconds or self.resident_share >= 1


@dataclass(frozen=True)
class Plan:
    """Predictions for a sweep of budgets, by budget."""

    weights: tuple[PlannedWeight, ...]
    bandwidth: float
    latency: float
    prefetch: int
    #: "host", "cuda" or "torch": as which memory is laid out.
    backend: str
    predictions: tuple[Prediction, ...]
    #: Budgets that were asked for: those that work, and those that do not.
    asked: tuple[int, ...]
    too_small: tuple[int, ...]
    smallest: int
    #: The budget with which every weight is resident.
    all: int
    #: From about this budget on, compute hides the copies; `all` if nothing less does.
    hidden_from: int
    #: The prediction for "minimum", if that was asked for; it is in `predictions` too.
    minimum: Prediction | None
    _predictor: _Predictor = field(repr=False, compare=False)

    def at(self, budget: int | str) -> Prediction:
        """Predict a pass for any budget, as `plan` takes them. Raises BudgetError under the smallest."""
        return self._predictor.of(budget)

    def curve(self, points: int = 60) -> list[Prediction]:
        """Predict a pass at some `points` budgets from the smallest to all, and at those of the sweep."""
        step = (self.all - self.smallest) / max(1, points - 1)
        # Where little fits, a little more is much.
        places = (*range(points), 0.03, 0.06, 0.12, 0.25, 0.5)
        budgets = {self.smallest + round(step * place) for place in places}
        budgets |= {prediction.budget for prediction in self.predictions}
        return [self._predictor.at(budget) for budget in sorted(budgets)]


@check_option_names
def predict(
    weights: Sequence[PlannedWeight],
    *,
    budgets: Iterable[int | str] = (),
    shares: Iterable[float | str] = (),
    bandwidth: float | str,
    latency: float = ASSUMED.latency,
    prefetch: int = 2,
    backend: str = "cuda",
) -> list[Prediction]:
    """Predict what a pass takes at each budget.

    Parameters
    ----------
    weights
        In the order of use, with their compute (`timed`, `spread` or `measure` gave it).
    budgets
        Bytes for streamed and resident weights together, as a number or a size such as "6GiB"; or "minimum":
        what `install(budget="minimum")` takes.
    shares
        More budgets, as shares of the model: 0.25, "25%" or "1/4". (A fraction that `install` is given is one
        of the device's free memory, which is not known here.)
    bandwidth
        Bytes a second from masters to the device, or a text such as "25GB/s".
    latency
        Seconds to begin a copy.
    prefetch
        As for `install`.
    backend
        "host" for an install on the CPU, "cuda" or "torch" on an accelerator: memory is laid out so.

    Returns
    -------
    list of Prediction
        One for each budget, then one for each share, in their order. Each is of its budget alone, whatever
        the others are. A budget may be predicted to be slower than a smaller one: weights are grouped, and
        residents chosen, for each by itself.

    Raises
    ------
    BudgetError
        A budget is under the smallest that works, which the error names.
    ConfigError
        There are no weights, a number cannot be used, or the native extension is not there.
    """
    predictor = _Predictor(weights, bandwidth, latency, prefetch, backend)
    named = map(predictor.of, budgets)
    return [*named, *(predictor.at(parse_share(share, predictor.total)) for share in shares)]


@check_option_names
def plan(
    weights: Sequence[PlannedWeight],
    *,
    budgets: Iterable[int | str] = (),
    shares: Iterable[float | str] = (),
    bandwidth: float | str,
    latency: float = ASSUMED.latency,
    prefetch: int = 2,
    backend: str = "cuda",
) -> Plan:
    """Predict a pass for the budgets that are asked for, and for a sweep from the smallest to all.

    The sweep has the smallest budget that works, 10, 25, 50, 75 and 90 % of the model, and all of it. Other
    parameters are those of `predict`.

    Raises
    ------
    ConfigError
        As `predict`. A budget that is too small is no error: it is named in the plan.
    """
    planned = tuple(weights)
    predictor = _Predictor(planned, bandwidth, latency, prefetch, backend)
    smallest, _ = native_extension().smallest_budget(**_of_engine(planned, backend))
    # What groups take with what lies between their weights: a little more than the weights.
    total = predictor.total
    whole = predictor.at(2 * total + (1 << 20) * len(planned)).resident_bytes
    # Smaller groups, as of a smaller budget, have more between them.
    while predictor.at(whole).resident_share < 1:
        whole += max(1, whole // 64)
    asked = list(budgets)
    minimum = predictor.minimum() if any(is_named(budget, MINIMUM) for budget in asked) else None
    sizes = (_bytes_of(budget) for budget in asked if not is_named(budget, MINIMUM))
    wanted = sorted({*sizes, *(parse_share(share, total) for share in shares)})
    sweep = {smallest, whole, *(round(share * whole) for share in _SHARES)}
    usual = [predictor.at(budget) for budget in sorted(sweep) if budget >= smallest]
    predictions = [predictor.at(budget) for budget in sorted({*sweep, *wanted}) if budget >= smallest]
    # Between the largest budget of the sweep that does not hide the copies, and the next one: what else is
    # asked for does not change it.
    low = hidden_from = usual[0].budget
    for smaller, larger in pairwise(usual):
        if not smaller.hidden:
            low, hidden_from = smaller.budget, larger.budget
    while hidden_from - low > max(1, whole // 256):
        middle = (low + hidden_from) // 2
        low, hidden_from = (low, middle) if predictor.at(middle).hidden else (middle, hidden_from)
    if minimum is not None:
        predictions = sorted([*predictions, minimum], key=lambda prediction: prediction.budget)
        wanted.append(minimum.budget)
    return Plan(
        weights=planned,
        bandwidth=predictor.rate,
        latency=latency,
        prefetch=prefetch,
        backend=backend,
        predictions=tuple(predictions),
        asked=tuple(budget for budget in sorted(wanted) if budget >= smallest),
        too_small=tuple(budget for budget in wanted if budget < smallest),
        smallest=smallest,
        all=whole,
        hidden_from=hidden_from,
        minimum=minimum,
        _predictor=predictor,
    )


class _Predictor:
    """Predicts the pass at each budget. Simulates each budget once."""

    def __init__(
        self,
        weights: Sequence[PlannedWeight],
        bandwidth: float | str,
        latency: float,
        prefetch: int,
        backend: str,
    ) -> None:
        self.rate = _check(weights, bandwidth, latency, prefetch, backend)
        self.total = sum(weight.nbytes for weight in weights)
        self._used = sum(weight.nbytes * (weight.by_use or 1.0) for weight in weights)
        # The clock moves device bytes. Where copies move fewer or more (a cast), its bus is faster or slower.
        self._moved = sum(weight.moved_bytes for weight in weights) / self.total
        self._bus = self.rate / self._moved
        self._options: dict[str, Any] = {
            **_of_engine(weights, backend),
            "prefetch": prefetch,
            "bandwidth": self._bus,
            "latency": latency,
            "passes": _passes(weights),
            "placement": "timed",  # as install(budget="auto") places residents
        }
        self._known: dict[int, Prediction] = {}

    def of(self, budget: int | str) -> Prediction:
        """Return the prediction for a budget as `predict` takes it."""
        return self.minimum() if is_named(budget, MINIMUM) else self.at(_bytes_of(budget))

    def at(self, budget: int) -> Prediction:
        """Return the prediction for this budget, with the groups and the residents that are found for it."""
        if budget not in self._known:
            self._known[budget] = self._prediction(budget, self._simulate(budget))
        return self._known[budget]

    def minimum(self) -> Prediction:
        """Return the prediction for "minimum", for which the engine takes a budget of 0."""
        result = self._simulate(0)
        return self._prediction(result["arena_bytes"], result)

    def _simulate(self, budget: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = native_extension().simulate(budget=budget, **self._options)
        return found

    def _prediction(self, budget: int, result: Mapping[str, Any]) -> Prediction:
        streamed = result["streamed_bytes"]
        # Of the streamed weights, what a pass moves; what it moves twice is no need of the bus.
        share = min(1.0, result["moved_bytes"] / streamed) if streamed else 1.0
        return Prediction(
            budget=budget,
            resident_share=1 - streamed / self.total,
            resident_bytes=result["resident_bytes"],
            moved_bytes=result["moved_bytes"] * self._moved,
            seconds=result["seconds_per_pass"],
            compute_seconds=result["compute_seconds"],
            copy_seconds=result["copy_seconds"] * share,
            # A pass begins with no more of the weights that it uses there than the budget holds.
            limit_seconds=max(result["compute_seconds"], (self._used - budget) / self._bus),
            stall_seconds=result["stall_seconds"],
            misses=result["misses"],
            groups=result["groups"],
            depth=result["depth"],
        )


def _passes(weights: Sequence[PlannedWeight]) -> int:
    least = min((weight.by_use for weight in weights if weight.by_use), default=1.0)
    return max(_PASSES, min(_MOST_PASSES, math.ceil(_PASSES_BY_USE / least)))


def _bytes_of(budget: int | str) -> int:
    """Return a budget in bytes."""
    if isinstance(budget, str):
        return parse_planned(budget)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigError(f"a budget is {budget!r}; expected bytes, 1 or more, or a text such as '6GiB'")
    return budget


def _of_engine(weights: Sequence[PlannedWeight], backend: str) -> dict[str, Any]:
    """Return the weights as the engine takes them."""
    return {
        "weights": [(weight.name, weight.nbytes, weight.seconds, weight.unit) for weight in weights],
        "places": [weight.place for weight in weights],
        "at_once": {weight.unit for weight in weights if weight.at_once},
        "by_use": {weight.unit: weight.by_use for weight in weights if weight.by_use},
        "also_in": {number: weight.also_in for number, weight in enumerate(weights) if weight.also_in},
        "backend": backend,
    }


def _check(
    weights: Sequence[PlannedWeight], bandwidth: float | str, latency: float, prefetch: int, backend: str
) -> float:
    """Return the bandwidth in bytes per second; raise ConfigError if an argument cannot be used."""
    if not weights or not sum(weight.nbytes for weight in weights):
        raise ConfigError("there are no weights to plan for; name a checkpoint or a model that has some")
    rate = parse_bandwidth(bandwidth) if isinstance(bandwidth, str) else bandwidth
    ahead = isinstance(prefetch, int) and not isinstance(prefetch, bool) and prefetch >= 0
    for name, value, fine, expected in (
        ("backend", backend, backend in ("host", "cuda", "torch"), "'host' (for the CPU), 'cuda' or 'torch'"),
        ("bandwidth", bandwidth, 0 < rate < math.inf, "bytes a second, above zero"),
        ("latency", latency, 0 <= latency < math.inf, "seconds a copy, 0 or more"),
        ("prefetch", prefetch, ahead, "the number of groups to read ahead, 0 or more"),
    ):
        if not fine:
            raise ConfigError(f"{name} is {value!r}; expected {expected}")
    wrong = [weight.name for weight in weights if weight.nbytes <= 0 or not 0 <= weight.seconds < math.inf]
    if wrong:
        raise ConfigError(
            f"{len(wrong)} weight(s) have no bytes, or an invalid compute time: {listed(wrong)}; "
            "expected bytes above zero and seconds, 0 or more"
        )
    return rate
