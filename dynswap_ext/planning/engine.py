"""The one place that runs the engine on its virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dynswap_ext.errors import BudgetError, ConfigError
from dynswap_ext.planning.weights import Weight

__all__ = ["smallest_budget", "virtual_pass"]

#: The first half is warm-up: it learns the order, and the next one begins with a full ring.
_PASSES: Final = 6


def virtual_pass(
    weights: Sequence[Weight], budget: int, *, bandwidth: float, latency: float, prefetch: int
) -> dict[str, Any]:
    """What a pass in the steady state takes, as `_C.simulate` has it; bytes are device bytes.

    The clock moves device bytes. Where copies move fewer or more (a cast), its bus is as much faster or
    slower.

    Raises
    ------
    BudgetError
        The budget is under the smallest that works.
    ConfigError
        The native extension cannot be imported.
    """
    simulate = _simulate()
    moved = sum(weight.moved_bytes for weight in weights) / sum(weight.nbytes for weight in weights)
    result: dict[str, Any] = simulate(
        [(weight.name, weight.nbytes, weight.seconds, weight.unit) for weight in weights],
        budget=budget,
        prefetch=prefetch,
        bandwidth=bandwidth / moved,
        latency=latency,
        passes=_PASSES,
        placement="timed",  # as install(budget="auto") places them
    )
    result["bus_bytes"] = result["moved_bytes"] * moved
    return result


def smallest_budget(weights: Sequence[Weight], *, prefetch: int) -> int:
    """Bytes of the smallest budget that works."""
    try:
        virtual_pass(weights, 1, bandwidth=1.0, latency=0.0, prefetch=prefetch)
    except BudgetError as error:
        return error.smallest_bytes
    return 1  # one weight of one byte


def _simulate() -> Any:
    try:
        from dynswap_ext import _C
    except ImportError as error:
        raise ConfigError(
            "plans come from the engine on its virtual clock, which is part of the native extension, and "
            "that "
            f"cannot be imported ({error}); `dynswap info` says why, and `pip install .` with a C++20 "
            "compiler builds it"
        ) from error
    return _C.simulate
