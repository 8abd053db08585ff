"""From weights to seconds of compute, without running anything: a rate of arithmetic and of memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynswap_ext._util.units import parse_bandwidth, parse_seconds, parse_throughput
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.weights import PlannedWeight

_MOST_ROWS: Final = 1 << 40


@dataclass(frozen=True)
class Machine:
    """A device and the way to it."""

    name: str
    #: Bytes a second from masters to the device.
    bandwidth: float
    #: Floating-point operations a second in matrix products.
    arithmetic: float
    #: Bytes a second of the device's own memory.
    memory: float
    #: Seconds to begin a copy.
    latency: float = 7e-6
    #: How the bandwidth was measured; empty if it was not.
    bandwidth_kind: str = ""

    def with_rates(
        self,
        *,
        bandwidth: str | None = None,
        arithmetic: str | None = None,
        memory: str | None = None,
        latency: str | None = None,
    ) -> Machine:
        """Return the machine with other rates, written as "25GB/s", "120TFLOPS", "900GB/s" and "7us".

        Raises
        ------
        ConfigError
            A rate cannot be read.
        """
        return replace(
            self,
            bandwidth=parse_bandwidth(bandwidth) if bandwidth else self.bandwidth,
            arithmetic=parse_throughput(arithmetic) if arithmetic else self.arithmetic,
            memory=parse_bandwidth(memory) if memory else self.memory,
            latency=parse_seconds(latency) if latency else self.latency,
        )


#: What is taken where nothing is given and nothing is measured; benchmarks/virtual_clock.py has the same.
ASSUMED: Final = Machine("a PCIe 4 card", bandwidth=26e9, arithmetic=120e12, memory=0.9e12)


def timed(weights: Sequence[PlannedWeight], machine: Machine, *, rows: int = 1) -> tuple[PlannedWeight, ...]:
    """Return the weights, each with its compute: the longer of its operations and its bytes.

    A matrix takes 2 operations an element and row (one row if it is a time step's); a norm reads and writes
    its rows; what is looked up takes nothing. Attention products and activations are not counted.

    Parameters
    ----------
    weights
        In the order of use.
    machine
        Its `arithmetic` and `memory` are used.
    rows
        Vectors that a pass multiplies by each matrix: tokens, times the batch.

    Raises
    ------
    ConfigError
        `rows` is less than 1, or a rate is not above zero.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"rows is {rows!r}; expected the number of rows of a pass, 1 or more")
    for name, rate in (("arithmetic", machine.arithmetic), ("memory", machine.memory)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{name} of the machine is {rate!r}; expected a rate a second, above zero")
    return tuple(replace(weight, seconds=_seconds(weight, machine, rows)) for weight in weights)


def spread(weights: Sequence[PlannedWeight], seconds: float) -> tuple[PlannedWeight, ...]:
    """Return the weights, with the time of a pass divided among them by their operations.

    By bytes, if none is a matrix.

    Raises
    ------
    ConfigError
        `seconds` is negative or not finite.
    """
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"the compute of a pass is {seconds!r}; expected seconds, 0 or more")
    parts = [weight.elements * weight.share if weight.kind == "matrix" else 0.0 for weight in weights]
    if not any(parts):
        parts = [float(weight.nbytes) for weight in weights]
    whole = math.fsum(parts)
    return tuple(
        replace(weight, seconds=seconds * part / whole) for weight, part in zip(weights, parts, strict=True)
    )


def rows_to_hide(weights: Sequence[PlannedWeight], machine: Machine, seconds: float) -> int | None:
    """Return the fewest rows with which a pass computes for so long; None if no number of rows does."""

    def computes(rows: int) -> float:
        return math.fsum(_seconds(weight, machine, rows) for weight in weights)

    rows = bisect_left(range(_MOST_ROWS), seconds, lo=1, key=computes)
    return rows if rows < _MOST_ROWS else None


def _seconds(weight: PlannedWeight, machine: Machine, rows: int) -> float:
    if weight.kind == "lookup":
        return 0.0
    rows_seen = 1.0 if weight.kind == "once" else rows * weight.share
    read = weight.nbytes * min(1.0, rows_seen) / machine.memory
    if weight.kind in ("matrix", "once"):
        return max(2.0 * weight.elements * rows_seen / machine.arithmetic, read)
    return read + (2.0 * rows_seen * weight.nbytes / machine.memory if weight.kind == "norm" else 0.0)
