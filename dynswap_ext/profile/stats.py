"""`Stats`: the counters of an install, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import show_ns


@dataclass(frozen=True)
class Stats:
    """Counters and plan of one install, taken at one moment; ``print`` shows them with units.

    Weights travel in groups, one copy for each. Times are in nanoseconds. With the pure-Python provider every
    weight is a group of its own, and nothing is prefetched.
    """

    #: "native" or "python".
    provider: str
    #: "host", "cuda", "torch" (torch's own streams) or "python".
    backend: str

    #: Groups found on the device, or on their way, when they were needed.
    hits: int
    #: Hits whose copy was on its way but had not arrived yet.
    late_hits: int
    #: Groups whose copy was issued only when they were needed.
    misses: int
    #: Copies issued ahead of need.
    prefetches: int
    #: Copies issued ahead of need that were overwritten before anything read them, or were guessed wrong.
    wasted_prefetches: int
    #: Copies of experts that were issued before their router had chosen them.
    guesses: int
    #: Guesses whose experts the router then chose.
    right_guesses: int
    #: Copies on the device that were discarded because their master had changed.
    refetches: int
    #: All copies issued.
    copies: int
    #: Bytes of masters that all copies have read. The disk may have read less (the page cache had some) or
    #: more (the system reads ahead).
    bytes_moved: int
    #: Bytes of the values that `bytes_moved` stands for: more than these if masters are coded without loss,
    #: else as many.
    bytes_decoded: int
    #: Time that the calling threads were blocked on copies. On an accelerator, streams wait for copies,
    #: and threads hardly ever do: `Handle.record` measures the waits of streams.
    stall_ns: int
    #: Most bytes held beyond the budget at one time, because the program kept tensors that `module.weight`
    #: returned (in a list, in an autograd graph). A budget that is larger by about as much has room for them.
    overflow_bytes: int
    #: Most device bytes held at one time.
    peak_bytes: int
    #: Groups that stayed on the device (residents) and lost their memory to other tensors inside a call
    #: (`budget="auto"`). They are streamed until the next plan.
    given_way: int
    #: Bytes of the groups that stayed on the device (residents) and lost their memory to other tensors inside
    #: a call (`budget="auto"`).
    given_way_bytes: int
    #: How often a calling thread waited for the device for another reason than a copy.
    host_synchronisations: int
    #: Bytes of tensors saved for backward that were copied to the host (`install(activations=)`).
    offloaded_bytes: int
    #: Bytes of tensors saved for backward that were brought back.
    restored_bytes: int
    #: Most bytes of tensors saved for backward that had not left the device yet, or were on their way to the
    #: host, at one time; not those that came back.
    saved_bytes: int
    #: Bytes of the tensors that the latest step saved for backward, of those that may leave the device.
    saved_step_bytes: int

    #: All groups of weights in the plan.
    groups: int
    #: Groups of weights in the plan that stay on the device (residents).
    resident_groups: int
    #: Device bytes of all weights.
    weight_bytes: int
    #: Device bytes of the groups that stay on the device (residents).
    resident_bytes: int
    #: Device bytes of the arena, the block of memory through which streamed groups pass.
    arena_bytes: int
    #: Groups that the arena has room for ahead of the one in use.
    depth: int

    #: Places on the device that tensors which `module.weight` returned, and that still live, hold now.
    live_leases: int

    #: Bytes of masters that the device reads directly, because they or copies of them are page-locked.
    pinned_bytes: int
    #: Bytes of masters in RAM that are not page-locked, and go through a small pinned buffer. 0 on the CPU.
    staged_bytes: int
    #: Bytes of masters that are read from the files that they are mapped from.
    mapped_bytes: int

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return "\n".join(f"{name.removesuffix('_ns'):22}{_shown(name, value)}" for name, value in values)

    @classmethod
    def from_counters(cls, counters: Mapping[str, int], *, provider: str, backend: str) -> Stats:
        """Return the values of a session's counters. A missing counter is 0, and an unknown one an error."""
        values: dict[str, Any] = dict.fromkeys((field.name for field in fields(cls)), 0)
        return cls(**{**values, **counters, "provider": provider, "backend": backend})


def _shown(name: str, value: int | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_ns"):
        return show_ns(value)
    return format_bytes(value) if name.startswith("bytes_") or name.endswith("_bytes") else f"{value:,}"
