"""Predictions: what a pass takes at each budget, and from which budget on copies are hidden.

The engine itself answers, on a virtual clock: nothing here knows how it groups weights or places residents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

from dynswap_ext._provider import native_extension
from dynswap_ext._util.units import parse_bandwidth, parse_share
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.rates import ASSUMED
from dynswap_ext.planning.weights import PlannedWeight

#: Shares of the model that a plan looks at beside what is asked for.
_SHARES: Final = (0.10, 0.25, 0.50, 0.75, 0.90)
#: Copies are hidden where a pass takes at most so much of its compute.
_HIDDEN: Final = 1.01
#: Of the virtual clock. The first half is warm-up: it learns the order, and the next begins with a full ring.
_PASSES: Final = 6


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

    def at(self, budget: int | str) -> Prediction:
        """Predict a pass for any budget, as `plan` takes them. Raises BudgetError under the smallest."""
        wanted = _bytes_of(budget, sum(weight.nbytes for weight in self.weights))
        smaller = (prediction.budget for prediction in self.predictions if prediction.budget < wanted)
        return self._predict([*smaller, wanted])[-1]

    def curve(self, points: int = 60) -> list[Prediction]:
        """Predict a pass at some `points` budgets from the smallest to all, and at those of the sweep."""
        step = (self.all - self.smallest) / max(1, points - 1)
        # Where little fits, a little more is much.
        places = (*range(points), 0.03, 0.06, 0.12, 0.25, 0.5)
        budgets = {self.smallest + round(step * place) for place in places}
        return self._predict(sorted(budgets | {prediction.budget for prediction in self.predictions}))

    def _predict(self, budgets: Sequence[int]) -> list[Prediction]:
        return predict(
            self.weights,
            budgets=budgets,
            bandwidth=self.bandwidth,
            latency=self.latency,
            prefetch=self.prefetch,
            backend=self.backend,
        )


def predict(
    weights: Sequence[PlannedWeight],
    *,
    budgets: Iterable[int | str],
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
        Bytes for streamed and resident weights together, as a number, a size such as "6GiB", or a share of
        the model such as "25%".
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
        One for each budget, in their order. A budget that is slower than a smaller one of them is predicted
        as that: the rest of it would be left unused.

    Raises
    ------
    BudgetError
        A budget is under the smallest that works, which the error names.
    ConfigError
        There are no weights, a number cannot be used, or the native extension is not there.
    """
    rate = _check(weights, bandwidth, latency, prefetch, backend)
    total = sum(weight.nbytes for weight in weights)
    wanted = [_bytes_of(budget, total) for budget in budgets]
    # The clock moves device bytes. Where copies move fewer or more (a cast), its bus is faster or slower.
    moved = sum(weight.moved_bytes for weight in weights) / total
    bus = rate / moved
    simulate = partial(
        native_extension().simulate,
        **_of_engine(weights, backend),
        prefetch=prefetch,
        bandwidth=bus,
        latency=latency,
        passes=_PASSES,
        placement="timed",  # as install(budget="auto") places residents
    )
    found: dict[int, Prediction] = {}
    last: Prediction | None = None
    for budget in sorted(set(wanted)):
        result = simulate(budget=budget)
        streamed = result["streamed_bytes"]
        # Of the streamed weights, what a pass moves; what it moves twice is no need of the bus.
        share = min(1.0, result["moved_bytes"] / streamed) if streamed else 1.0
        own = Prediction(
            budget=budget,
            resident_share=1 - streamed / total,
            resident_bytes=result["resident_bytes"],
            moved_bytes=result["moved_bytes"] * moved,
            seconds=result["seconds_per_pass"],
            compute_seconds=result["compute_seconds"],
            copy_seconds=result["copy_seconds"] * share,
            # A pass uses all weights, and begins with no more of them on the device than the budget holds.
            limit_seconds=max(result["compute_seconds"], (total - budget) / bus),
            stall_seconds=result["stall_seconds"],
            misses=result["misses"],
            groups=result["groups"],
            depth=result["depth"],
        )
        # Placements are searched for, so a larger budget may have found a worse one than a smaller budget.
        if last is not None and own.seconds > last.seconds * (1 + 1e-9):
            own = replace(last, budget=budget, limit_seconds=own.limit_seconds)
        found[budget] = last = own
    return [found[budget] for budget in wanted]


def plan(
    weights: Sequence[PlannedWeight],
    *,
    budgets: Iterable[int | str] = (),
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
    kept = tuple(weights)
    rate = _check(kept, bandwidth, latency, prefetch, backend)

    def at(*budgets: int) -> list[Prediction]:
        options: dict[str, Any] = {"latency": latency, "prefetch": prefetch, "backend": backend}
        return predict(kept, budgets=budgets, bandwidth=rate, **options)

    smallest, _ = native_extension().smallest_budget(**_of_engine(kept, backend))
    # What groups take with what lies between their weights: a little more than the weights.
    total = sum(weight.nbytes for weight in kept)
    whole = at(2 * total + (1 << 20) * len(kept))[0].resident_bytes
    while at(whole)[0].resident_share < 1:  # smaller groups, as of a smaller budget, have more between them
        whole += max(1, whole // 64)
    wanted = sorted({_bytes_of(budget, total) for budget in budgets})
    sweep = {smallest, whole, *wanted, *(round(share * whole) for share in _SHARES)}
    predictions = at(*(budget for budget in sorted(sweep) if budget >= smallest))
    # Between the largest budget of the sweep that does not hide the copies, and the next one.
    low = hidden_from = predictions[0].budget
    for smaller, larger in pairwise(predictions):
        if not smaller.hidden:
            low, hidden_from = smaller.budget, larger.budget
    while hidden_from - low > max(1, whole // 256):
        middle = (low + hidden_from) // 2
        low, hidden_from = (low, middle) if at(middle)[0].hidden else (middle, hidden_from)
    return Plan(
        weights=kept,
        bandwidth=rate,
        latency=latency,
        prefetch=prefetch,
        backend=backend,
        predictions=tuple(predictions),
        asked=tuple(budget for budget in wanted if budget >= smallest),
        too_small=tuple(budget for budget in wanted if budget < smallest),
        smallest=smallest,
        all=whole,
        hidden_from=hidden_from,
    )


def _bytes_of(budget: int | str, whole: int) -> int:
    """Return a budget in bytes; a share is one of `whole`."""
    if isinstance(budget, str):
        return parse_share(budget, whole)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ConfigError(f"a budget is {budget!r}; expected bytes, 1 or more, or a text such as '6GiB'")
    return budget


def _of_engine(weights: Sequence[PlannedWeight], backend: str) -> dict[str, Any]:
    """Return the weights as the engine takes them."""
    return {
        "weights": [(weight.name, weight.nbytes, weight.seconds, weight.unit) for weight in weights],
        "places": [weight.place for weight in weights],
        "at_once": {weight.unit for weight in weights if weight.at_once},
        "backend": backend,
    }


def _check(
    weights: Sequence[PlannedWeight], bandwidth: float | str, latency: float, prefetch: int, backend: str
) -> float:
    """Return the bandwidth as a number, if all can be used."""
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
            f"{len(wrong)} weight(s) have no bytes, or an invalid compute time: {', '.join(wrong[:5])}; "
            "expected bytes above zero and seconds, 0 or more"
        )
    return rate
