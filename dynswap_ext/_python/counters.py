"""What the pure-Python provider counts of each weight, and records (native: csrc/core).

Each weight is a group. Copies are synchronous: a copy and the wait for it are one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._util.file_mappings import FileMappings

__all__ = ["GroupCounters", "GroupStats"]

#: Spans that one recording holds, some 60 MB of them.
_MOST_SPANS: Final = 1 << 18


class GroupCounters:
    """Counters of one weight, and what is said of it."""

    __slots__ = (
        "bytes",
        "bytes_moved",
        "causes",
        "changed",
        "copied_before",
        "copies",
        "copy_ns",
        "first_use",
        "hits",
        "name",
        "resident",
        "source",
    )

    def __init__(self) -> None:
        self.name, self.source = "?", "RAM"
        self.bytes, self.resident = 0, False
        #: When it was first used, counted over the session's weights; None: not yet.
        self.first_use: int | None = None
        self.copied_before = False
        #: Whether the next copy is made because the master is another.
        self.changed = False
        self.reset()

    def reset(self) -> None:
        """Set the counters to zero."""
        self.hits = self.copies = self.bytes_moved = self.copy_ns = 0
        self.causes: dict[str, int] = {}

    def figures(self) -> dict[str, Any]:
        """What `Session.groups` gives of it."""
        return {
            "names": [self.name],
            "bytes": self.bytes,
            "source": self.source,
            "resident": self.resident,
            "hits": self.hits,
            "late_hits": 0,
            "misses": self.copies,
            "copies": self.copies,
            "bytes_moved": self.bytes_moved,
            "copy_ns": self.copy_ns,
            "stall_ns": self.copy_ns,
            "causes": dict(self.causes),
            "held_by": "",
        }


class GroupStats:
    """The counts of one session's weights. The session's lock guards it."""

    def __init__(self) -> None:
        self._counts: dict[GroupCounters, None] = {}  # in the order of definition
        self._used = 0
        self.recording = False
        self._spans: list[tuple[str, GroupCounters | None, int, int, str, int, int]] = []
        self._dropped = 0

    def plan(self, counts: Iterable[GroupCounters]) -> None:
        """Keep the counts of these weights, and no others."""
        self._counts = dict.fromkeys(counts)

    def name(self, root: nn.Module | None, masters: dict[GroupCounters, torch.Tensor]) -> None:
        """Note what the weights are called by now."""
        if root is None:
            return
        names: dict[int, str] = {}
        for path, module in root.named_modules():
            prefix = f"{path}." if path else ""
            for members in (module._parameters, module._buffers):
                for name, master in members.items():
                    if master is not None:
                        names.setdefault(id(master), prefix + name)
        for counts, master in masters.items():
            counts.name = names.get(id(master), counts.name)

    @staticmethod
    def locate(masters: dict[GroupCounters, torch.Tensor]) -> None:
        """Note where their bytes are by now."""
        files = FileMappings()
        for counts, master in masters.items():
            counts.source = _source_of(master, files)

    def groups(self) -> list[dict[str, Any]]:
        """SessionStatistics of each weight, in the order of use; those never used come last."""
        return [counts.figures() for counts in self._in_order()]

    def hit(self, counts: GroupCounters) -> None:
        """The weight was on the device."""
        counts.hits += 1
        if counts.first_use is None:
            self._first_use(counts)

    def used(self, counts: GroupCounters, held: int) -> None:
        """The weight is computed with from now on; `held` bytes are on the device. While it records."""
        now = time.monotonic_ns()
        self._add("use", counts, now, now, "", held, threading.get_native_id())

    def copied(self, counts: GroupCounters, begin: int, end: int, nbytes: int) -> None:
        """The weight was copied while its consumer waited; times are of ``time.monotonic_ns``."""
        took = end - begin
        if not counts.copied_before:
            cause = "first use"
        else:
            cause = "master changed" if counts.changed else "not predicted"
        counts.copied_before, counts.changed = True, False
        counts.copies += 1
        counts.bytes_moved += nbytes
        counts.copy_ns += took
        counts.causes[cause] = counts.causes.get(cause, 0) + took
        if self.recording:
            thread = threading.get_native_id()
            self._add("copy", counts, begin, end, "demanded", nbytes, 0)
            self._add("wait", counts, begin, end, cause, nbytes, thread)
        if counts.first_use is None:
            self._first_use(counts)

    def passed(self) -> None:
        """A call of the model begins."""
        if self.recording:
            now = time.monotonic_ns()
            self._add("pass", None, now, now, "", 0, threading.get_native_id())

    def reset(self) -> None:
        """Set the counters to zero."""
        for counts in self._counts:
            counts.reset()

    def record(self, on: bool) -> None:
        """Begin, dropping what was recorded, or end."""
        if on:
            self._spans, self._dropped = [], 0
        self.recording = on

    def timeline(self) -> dict[str, Any]:
        """What was recorded."""
        index = {counts: i for i, counts in enumerate(self._in_order())}
        spans = [
            (kind, -1 if counts is None else index[counts], *rest)
            for kind, counts, *rest in sorted(self._spans, key=lambda span: span[2])
            if counts is None or counts in index  # else its weight has left the model
        ]
        return {"spans": spans, "dropped": self._dropped, "clock": "monotonic"}

    def _in_order(self) -> list[GroupCounters]:
        last = self._used
        return sorted(self._counts, key=lambda counts: last if counts.first_use is None else counts.first_use)

    def _first_use(self, counts: GroupCounters) -> None:
        counts.first_use = self._used
        self._used += 1
        self._counts.setdefault(counts)

    def _add(self, *span: Any) -> None:
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1


def _source_of(master: torch.Tensor, files: FileMappings) -> str:
    """Where a master's bytes are, in the words of `GroupFigures.source`."""
    if master.device.type != "cpu":
        return "device"
    if files.find(master.data_ptr()) is not None:
        return "file"
    return "pinned RAM" if torch.accelerator.is_available() and master.is_pinned() else "RAM"
