"""What goes to a baseline's process, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

RAM, FILE = "ram", "file"
#: Where a workload's weights lie before a call, and what that asks.
PLACEMENTS = {
    RAM: "weights in RAM",
    FILE: "weights in a file",
}


@dataclass(frozen=True)
class Job:
    """What one process does: one baseline on one workload, with the weights in one place."""

    workload: str
    size: str
    baseline: str
    placement: str
    device: str
    checkpoint: str
    #: A folder of this baseline and workload alone: what is written there is found again by the next.
    scratch: str
    #: Where the resident model's outputs are kept.
    reference: str
    #: How long calls are timed, and when it is enough although the least number of them is not reached.
    seconds: float
    patience: float


@dataclass
class Row:
    """What a process measured, or why it could not. Times are of one call of the model."""

    seconds: list[float] = field(default_factory=list)
    ready_seconds: float = 0.0  #: from the checkpoint to a model that can be called
    first_seconds: float = 0.0  #: the first call
    peak_bytes: int | None = None  #: in timed calls; RAM above the start, or device memory in all
    loading_peak_bytes: int | None = None  #: before that
    moved_bytes: float | None = None  #: a call; None where it cannot be counted
    disk_bytes: float | None = None  #: a call, as the system tells
    outputs: str = ""  #: "bit-equal", or how they differ from the resident model's
    failure: str = ""
    note: str = ""
    stats: dict[str, Any] = field(default_factory=dict)

    def joined(self, other: Row) -> Row:
        """This row with what another run of the same baseline measured."""
        if other.failure:  # what was measured before stands
            return replace(self, note=f"once: {other.failure}")
        same = self.outputs == other.outputs
        return replace(
            other,
            seconds=self.seconds + other.seconds,
            ready_seconds=min(self.ready_seconds, other.ready_seconds),
            first_seconds=min(self.first_seconds, other.first_seconds),
            peak_bytes=max(self.peak_bytes or 0, other.peak_bytes or 0) or None,
            loading_peak_bytes=max(self.loading_peak_bytes or 0, other.loading_peak_bytes or 0) or None,
            outputs=self.outputs if same else f"{self.outputs}, then {other.outputs}",
        )
