"""Predicts the time of a pass at each budget, and from which budget on compute hides the copies.

The engine itself runs, on a virtual clock: how it groups weights, and which stay on the device, is not
repeated here.
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

#: The budgets that a plan predicts in addition to those that are asked for, as shares of the model.
_SHARES: Final = (0.10, 0.25, 0.50, 0.75, 0.90)
#: Compute hides the copies if a pass takes at most its compute times this.
_HIDDEN: Final = 1.01
#: Simulated passes. The first half is warm-up, in which the engine learns the order and fills the arena.
_PASSES: Final = 6
#: With experts, this is divided by the smallest part of them that a pass uses, for at most `_MOST_PASSES`.
#: Each expert is then used often enough to show which of them stay on the device.
_PASSES_BY_USE: Final = 8
_MOST_PASSES: Final = 160


@dataclass(frozen=True)
class Prediction:
    """The prediction of a pass in the steady state, at one budget. Times are in seconds."""

    #: Bytes of the device for weights.
    budget: int
    #: The share of the weights' device bytes that stay on the device (residents): 0 to 1.
    resident_share: float
    #: Bytes that the weights take that stay on the device (residents).
    resident_bytes: int
    #: Bytes that a pass moves to the device.
    moved_bytes: float
    #: Time of the pass.
    seconds: float
    #: Time of the pass with all weights on the device.
    compute_seconds: float
    #: Time that the bus needs for the streamed weights that a pass moves.
    copy_seconds: float
    #: The least time with any order of copies: that of the compute, or that of copying the weights that the
    #: budget cannot hold.
    limit_seconds: float
    #: Time in which the compute waits for copies.
    stall_seconds: float
    #: Groups of weights whose copy begins only when they are needed, in a pass.
    misses: float
    #: The number of groups of weights. Those of a group travel in one copy.
    groups: int
    #: The number of groups for which the device has room ahead of the one in use.
    depth: int

    @property
    def to_limit(self) -> float:
        """The time of the pass divided by `limit_seconds`; 1 if that is 0."""
        return self.seconds / self.limit_seconds if self.limit_seconds > 0 else 1.0

    @property
    def to_resident(self) -> float:
        """The time of the pass divided by `compute_seconds`; if that is 0, infinite or, for no time, 1."""
        if self.compute_seconds > 0:
            return self.seconds / self.compute_seconds
        return math.inf if self.seconds > 0 else 1.0

    @property
    def hidden(self) -> bool:
        """Whether compute hides the copies: they add at most 1 % to its time, or all weights are resident."""
        return self.seconds <= _HIDDEN * self.compute_seconds or self.resident_share >= 1


@dataclass(frozen=True)
class Plan:
    """The result of `plan`: predictions of a pass for a sweep of budgets. All budgets are in bytes."""

    #: The weights in the order of use.
    weights: tuple[PlannedWeight, ...]
    #: Bytes per second from masters to the device.
    bandwidth: float
    #: Seconds to begin a copy.
    latency: float
    #: The option of `install`: groups of weights to fetch ahead of the one in use.
    prefetch: int
    #: "host", "cuda" or "torch": the backend of the engine, by which memory is laid out.
    backend: str
    #: The predictions, from the smallest budget to the largest.
    predictions: tuple[Prediction, ...]
    #: Budgets that were asked for and that work.
    asked: tuple[int, ...]
    #: Budgets that were asked for and are smaller than `smallest`.
    too_small: tuple[int, ...]
    #: The smallest budget that works.
    smallest: int
    #: The budget with which every weight stays on the device.
    all: int
    #: From about this budget on, compute hides the copies; `all` if only that does.
    hidden_from: int
    #: The prediction for "minimum", if that was asked for; it is in `predictions` too.
    minimum: Prediction | None
    _predictor: _Predictor = field(repr=False, compare=False)

    def at(self, budget: int | str) -> Prediction:
        """Predict a pass for any budget that `plan` takes. Raises BudgetError if it is too small."""
        return self._predictor.of(budget)

    def curve(self, points: int = 60) -> list[Prediction]:
        """Predict a pass for about `points` budgets, and for those in `predictions`, in ascending order.

        They lie between the smallest that works and the one with which every weight stays on the device.
        """
        step = (self.all - self.smallest) / max(1, points - 1)
        # More of them are small: where few weights stay, a little more memory changes much.
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
        The weights in the order of use, with the compute that `timed`, `spread` or `measure` gave them.
    budgets
        Bytes for weights on the device, as a number or a size such as "6GiB"; or "minimum": what
        `install(budget="minimum")` takes.
    shares
        More budgets, as shares of the model: 0.25, "25%" or "1/4". (To `install`, a fraction is one of the
        device's free memory, which is not known here.)
    bandwidth
        Bytes per second from masters to the device, or a text such as "25GB/s".
    latency
        Seconds to begin a copy.
    prefetch
        The option of `install`: groups of weights to fetch ahead of the one in use.
    backend
        The backend that the engine would have: "host" on the CPU, "cuda" or "torch" on an accelerator. It
        decides how memory is laid out.

    Returns
    -------
    list of Prediction
        One for each budget, then one for each share, in the order in which they are given. Weights are
        grouped, and those that stay on the device are chosen, for each budget alone. So a budget may be
        predicted to be slower than a smaller one.

    Raises
    ------
    BudgetError
        A budget is smaller than the smallest that works, which the error names.
    ConfigError
        There are no weights, a number cannot be used, or the native extension is not available.
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
    """Predict a pass for the budgets that are asked for, and for a sweep of others.

    The sweep has the smallest budget that works, 10, 25, 50, 75 and 90 % of the model, and all of it. The
    parameters are those of `predict`. A budget that is too small is no error: it is in `Plan.too_small`.

    Raises
    ------
    ConfigError
        There are no weights, a number cannot be used, or the native extension is not available.
    """
    planned = tuple(weights)
    predictor = _Predictor(planned, bandwidth, latency, prefetch, backend)
    smallest, _ = native_extension().smallest_budget(**_of_engine(planned, backend))
    # The bytes of all groups: a little more than those of the weights, as there are gaps between these.
    total = predictor.total
    whole = predictor.at(2 * total + (1 << 20) * len(planned)).resident_bytes
    # With a smaller budget, groups are smaller, and there are more gaps.
    while predictor.at(whole).resident_share < 1:
        whole += max(1, whole // 64)
    asked = list(budgets)
    minimum = predictor.minimum() if any(is_named(budget, MINIMUM) for budget in asked) else None
    sizes = (_bytes_of(budget) for budget in asked if not is_named(budget, MINIMUM))
    wanted = sorted({*sizes, *(parse_share(share, total) for share in shares)})
    sweep = {smallest, whole, *(round(share * whole) for share in _SHARES)}
    usual = [predictor.at(budget) for budget in sorted(sweep) if budget >= smallest]
    predictions = [predictor.at(budget) for budget in sorted({*sweep, *wanted}) if budget >= smallest]
    # `hidden_from` lies between the largest budget of the sweep with which compute does not hide the copies,
    # and the next one. Budgets that are asked for do not change it.
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
    """Predicts a pass at any budget. Each budget is simulated once."""

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
        # The simulation moves device bytes. Where copies move fewer or more bytes, because of a cast, it is
        # given a faster or slower bus.
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
        """Return the prediction for a budget that is a number, a size such as "6GiB", or "minimum"."""
        return self.minimum() if is_named(budget, MINIMUM) else self.at(_bytes_of(budget))

    def at(self, budget: int) -> Prediction:
        """Return the prediction for a budget in bytes."""
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
        # The share of the streamed weights that a pass has to move: what it moves twice counts once.
        share = min(1.0, result["moved_bytes"] / streamed) if streamed else 1.0
        return Prediction(
            budget=budget,
            resident_share=1 - streamed / self.total,
            resident_bytes=result["resident_bytes"],
            moved_bytes=result["moved_bytes"] * self._moved,
            seconds=result["seconds_per_pass"],
            compute_seconds=result["compute_seconds"],
            copy_seconds=result["copy_seconds"] * share,
            # When a pass begins, at most `budget` bytes of the weights that it uses are on the device.
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
    """Return the bytes of a budget that is a number or a size such as "6GiB"."""
    if isinstance(budget, str):
        return parse_planned(budget)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigError(f"a budget is {budget!r}; expected bytes, 1 or more, or a text such as '6GiB'")
    return budget


def _of_engine(weights: Sequence[PlannedWeight], backend: str) -> dict[str, Any]:
    """Return the arguments by which the engine's simulation is told the weights."""
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
    """Return the bandwidth in bytes per second. Raise ConfigError if an argument cannot be used."""
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
