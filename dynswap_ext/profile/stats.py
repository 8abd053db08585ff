"""What an install has counted, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import show_ns


@dataclass(frozen=True)
class Stats:
    """Counters and plan of one install, taken at one moment; ``print`` shows them with units.

    Times are nanoseconds of the host's monotonic clock. With the pure-Python provider every weight is a group
    of its own, and nothing is prefetched.
    """

    #: "native" or "python".
    provider: str
    #: "host", "cuda", "torch" (torch's own streams) or "python".
    backend: str

    #: Groups found on the device, or on their way, when they were needed.
    hits: int
    #: Of those, on their way but not there yet.
    late_hits: int
    #: Groups whose copy was issued only when they were needed.
    misses: int
    #: Copies issued ahead of need.
    prefetches: int
    #: Of those, overwritten before they were read, or guessed wrong.
    wasted_prefetches: int
    #: Of the copies issued ahead, experts whose router had not chosen yet.
    guesses: int
    #: Of those, chosen then.
    right_guesses: int
    #: Copies thrown away because their master had changed.
    refetches: int
    #: Copies issued.
    copies: int
    #: Bytes of masters that those copies read. The disk may have read less (the page cache) or more (the
    #: system reads ahead).
    bytes_moved: int
    #: Time for which the calling threads were blocked on copies. On an accelerator, streams wait for copies,
    #: and threads hardly ever do: `Handle.record` measures the waits of streams.
    stall_ns: int
    #: Most bytes held beyond the budget at one time, because handed-out tensors were kept (in a list, in a
    #: graph). A budget that is larger by about as much has room for them.
    overflow_bytes: int
    #: Most device bytes held at one time.
    peak_bytes: int
    #: Residents whose memory went to others inside a call (`budget="auto"`), and their bytes. Until the next
    #: plan they are streamed.
    given_way: int
    given_way_bytes: int
    #: How often a calling thread waited for the device other than for a copy.
    host_synchronisations: int

    #: Groups of weights that travel together, as planned.
    groups: int
    #: Of those, residents: they stay on the device.
    resident_groups: int
    #: Device bytes of all weights.
    weight_bytes: int
    #: Device bytes of the residents.
    resident_bytes: int
    #: Device bytes of the slots through which the others stream.
    arena_bytes: int
    #: Groups that the arena holds ahead of the current one.
    depth: int

    #: Slots that handed-out tensors hold at this moment.
    live_leases: int

    #: Bytes of masters that the device reads directly: they, or copies of them, are page-locked.
    pinned_bytes: int
    #: Bytes of masters in RAM that are not, and go through a small pinned buffer. 0 on the CPU.
    staged_bytes: int
    #: Bytes of masters that are read from the files that they are mapped from.
    mapped_bytes: int

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return "\n".join(f"{name.removesuffix('_ns'):22}{_shown(name, value)}" for name, value in values)

    @classmethod
    def from_counters(cls, counters: Mapping[str, int], *, provider: str, backend: str) -> Stats:
        """Build from a session's counters; a missing one is 0, and one of another name is an error."""
        values: dict[str, Any] = dict.fromkeys((field.name for field in fields(cls)), 0)
        return cls(**{**values, **counters, "provider": provider, "backend": backend})


def _shown(name: str, value: int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_ns"):
        return show_ns(value)
    return format_bytes(value) if name.startswith("bytes_") or name.endswith("_bytes") else f"{value:,}"
