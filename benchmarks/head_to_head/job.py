"""The job that goes to a baseline's process, and the row that comes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

RAM, FILE = "ram", "file"
#: Where a workload's weights are before a call, and what that measures.
PLACEMENTS = {
    RAM: "weights in RAM",
    FILE: "weights in a file",
}


@dataclass(frozen=True)
class Job:
    """The work of one process: one baseline on one workload, with the weights in one place."""

    workload: str
    size: str
    baseline: str
    placement: str
    device: str
    checkpoint: str
    #: A folder of this baseline and workload alone, which later processes find as this one leaves it.
    scratch: str
    #: Where the resident model's outputs are kept.
    reference: str
    #: The seconds for which calls are timed, and those after which fewer than the least number are enough.
    seconds: float
    patience: float


@dataclass
class Row:
    """The measurements of a process, or the reason why it failed. Times are of one call of the model."""

    seconds: list[float] = field(default_factory=list)
    ready_seconds: float = 0.0  #: from the checkpoint to a model that can be called
    first_seconds: float = 0.0  #: the first call
    peak_bytes: int | None = None  #: in timed calls; RAM above the start, or all device memory
    loading_peak_bytes: int | None = None  #: before the timed calls
    moved_bytes: float | None = None  #: a call; None where it cannot be counted
    disk_bytes: float | None = None  #: a call, as the system counts them
    outputs: str = ""  #: "bit-equal", or how they differ from the resident model's
    failure: str = ""
    note: str = ""
    stats: dict[str, Any] = field(default_factory=dict)

    def joined(self, other: Row) -> Row:
        """Return this row with the measurements of another run of the same baseline."""
        if other.failure:  # the measurements of the earlier run are kept
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
