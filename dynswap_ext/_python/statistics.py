"""What a session of the pure-Python provider says about itself: statistics, figures, recordings."""

from __future__ import annotations

from typing import Any

from dynswap_ext._python.counters import GroupStats
from dynswap_ext._python.held_copies import HeldCopies
from dynswap_ext._swap.protocol import Hooks

__all__ = ["SessionStatistics"]


class SessionStatistics(HeldCopies):
    """Counters, and what was recorded. Thread-safe."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(hooks)
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._plan = dict.fromkeys(_PLAN, 0)
        self._group_stats = GroupStats()
        self.outdated = False
        #: How often the model has been called.
        self.calls = 0

    def stats(self) -> dict[str, int]:
        """Counters and plan, named as in csrc/core/stats.h."""
        with self._exclusive:
            self._settle_deaths()
            self._find_lost()
            self._sweep()
            return {**self._counters, **self._plan, "live_leases": len(self._held)}

    def reset_stats(self) -> None:
        """Set the counters to zero; the plan stays."""
        with self._exclusive:
            self._counters = dict.fromkeys(_COUNTERS, 0)
            self._counters["peak_bytes"] = self._held_bytes()
            self._group_stats.reset()

    def groups(self) -> list[dict[str, Any]]:
        """SessionStatistics of each weight, in the order of use."""
        with self._exclusive:
            self._describe()
            return self._group_stats.groups()

    def record(self, on: bool) -> None:
        """Begin to record, dropping what was recorded, or end."""
        with self._exclusive:
            self._group_stats.record(on)

    def timeline(self) -> dict[str, Any]:
        """What was recorded."""
        with self._exclusive:
            return self._group_stats.timeline()

    def note_pass(self) -> None:
        """A call of the model begins."""
        if self._group_stats.recording:
            with self._exclusive:
                self._group_stats.passed()

    def _describe(self) -> None:
        """Note names and sources; what is noted stays when the weights are gone."""
        masters = {weight.counts: weight.master for weight in list(self._weights.values())}
        self._group_stats.name(self._root(), masters)
        self._group_stats.locate(masters)

    def seen(self) -> dict[str, Any]:
        """What the recorded passes took, as `Tuning` has it: from the first one's beginning to the last's."""
        spans = self.timeline()["spans"]
        begins = [span[2] for span in spans if span[0] == "pass"]
        passes = max(0, len(begins) - 1)
        inside = [span for span in spans if passes and begins[0] <= span[2] < begins[-1]]
        waited = sum(span[3] - span[2] for span in inside if span[0] == "wait")
        moved = sum(span[5] for span in inside if span[0] == "copy")
        whole = begins[-1] - begins[0] if passes else 0
        return {
            "passes": passes,
            "compute_seconds": (whole - waited) / 1e9 / max(1, passes),
            "wait_seconds": waited / 1e9 / max(1, passes),
            "bytes_per_second": moved / (waited / 1e9) if waited else 0.0,
            "seconds_before": None,
            "seconds_after": None,
        }


_COUNTERS = (
    "hits",
    "late_hits",
    "misses",
    "prefetches",
    "wasted_prefetches",
    "refetches",
    "copies",
    "bytes_moved",
    "stall_ns",
    "overflow_bytes",
    "peak_bytes",
    "host_synchronisations",
)
_PLAN = ("groups", "resident_groups", "weight_bytes", "resident_bytes", "arena_bytes", "depth")
