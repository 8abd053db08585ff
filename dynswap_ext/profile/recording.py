"""Figures of groups of weights, recordings of copies and waits, and the context that makes a recording."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from dynswap_ext._swap.protocol import Session
from dynswap_ext.errors import ConfigError

#: The causes of a stall (a wait for weights), each with what was waited for.
CAUSES: Final = {
    "first use": "weights that had never been copied before",
    "bus-bound": "the bus, which was busy with other copies",
    "late prefetch": "copies that were issued too late, while the bus was idle",
    "not predicted": "weights that nothing had fetched ahead",
    "arena full": "room in the arena, which was full of what had been fetched ahead",
    "slot held": "slots that handed-out tensors held",
    "master changed": "masters that had changed, and were copied again",
}

#: The kinds of spans that are copies: to the device, and away from it.
COPIES: Final = ("copy", "copy out")

#: The name of the row for tensors that have left the device until backward (`install(activations=)`).
SAVED_TENSORS: Final = "tensors saved for backward"


@dataclass(frozen=True)
class GroupFigures:
    """Figures of one group of weights, which travel in one copy. Times are in nanoseconds.

    Counters cover everything since the install, or since `Handle.reset_stats`. On an accelerator, times are
    those of the latest recording. With the pure-Python provider every weight is a group of its own.
    """

    #: Names of the group's weights, as ``named_parameters()`` and ``named_buffers()`` have them.
    names: tuple[str, ...]
    #: Bytes of the group on the device.
    bytes: int
    #: Where the group's masters are: "pinned RAM", "RAM", "file", or "device" if they are there already and
    #: are cast. A mapped file counts as "RAM" once most of it was written to, by an optimizer for example.
    source: str
    #: Whether the group stays on the device.
    resident: bool
    #: Whether the group is of an expert. Experts have no fixed order, and those used most stay on the device.
    by_use: bool
    #: How often the group was on the device, or on its way, when it was needed.
    hits: int
    #: How often the group was still on its way when it was needed.
    late_hits: int
    #: How often the copy of the group was issued only when it was needed.
    misses: int
    #: Copies of the group that were issued.
    copies: int
    #: Bytes that the copies of the group have read from masters.
    bytes_moved: int
    #: How long the copies of the group took; None if they were not timed (on an accelerator, copies outside
    #: a recording).
    copy_ns: int | None
    #: How long the model waited for the group.
    stall_ns: int
    #: How long the model waited for the group, by cause. `CAUSES` explains them.
    causes: Mapping[str, int]
    #: The weight of which the program kept a tensor, so that this group had no place on the device when it
    #: was needed last; empty if there was none.
    held_by: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GroupFigures:
        """Return the figures of a group from the values that a session has for it."""
        causes = {cause: ns for cause, ns in given["causes"].items() if ns}
        derived = {"names": tuple(given["names"]), "causes": causes, "stall_ns": sum(causes.values())}
        return cls(**{**given, **derived})


class Lane(NamedTuple):
    """Spans of one kind that do not overlap: one row in a viewer."""

    #: "copy", "copy 2" and so on, "copy out" likewise; or "wait" or "compute" of one thread.
    kind: str
    #: The name of the thread; empty for copies.
    thread: str
    #: The spans, in the order in which they began.
    spans: list[Span]


class Span(NamedTuple):
    """One event of a recording. Times are those of ``time.monotonic_ns``."""

    #: "copy", "copy out" (of a tensor that was saved for backward) and "wait" take time. "use" (a thread uses
    #: a group from now on) and "pass" (a pass begins) are moments: they end when they begin.
    kind: str
    #: An index into the recording's groups; -1 for a pass.
    group: int
    #: The time when it began.
    begin: int
    #: The time when it ended.
    end: int
    #: For a copy "demanded" or "prefetched", for a wait its cause.
    detail: str
    #: For a copy the bytes copied; for a use the bytes of weights held on the device at that time.
    bytes: int
    #: The id of the thread that uses the group; 0 for a copy.
    thread: int
    #: For a use the bytes of tensors saved for backward on the device at that time, as `activations=` counts
    #: them.
    saved_bytes: int = 0


@dataclass(frozen=True)
class Recording:
    """The copies, waits and uses of weights while a block ran."""

    #: The groups of weights, with their figures at the end.
    groups: tuple[GroupFigures, ...]
    #: What was recorded, in the order in which it began.
    spans: tuple[Span, ...]
    #: The number of spans for which there was no room.
    dropped: int
    #: The time of ``time.monotonic_ns`` when the recording began.
    begin: int
    #: The time of ``time.monotonic_ns`` when the recording ended.
    end: int
    #: The time since 1970 in nanoseconds is a time of ``time.monotonic_ns`` plus this.
    to_unix_ns: int
    #: The names of the threads, by the ids that the spans have.
    threads: Mapping[int, str]

    def of(self, *kinds: str) -> Iterator[Span]:
        """Yield the spans of these kinds."""
        return (span for span in self.spans if span.kind in kinds)

    def compute(self) -> Iterator[Span]:
        """Yield a span of compute from each use of a group to the thread's next wait or use of another."""
        running: dict[int, Span] = {}
        for span in self.spans:
            if span.kind in COPIES:
                continue
            before = running.pop(span.thread, None)
            if before is not None and span.kind == "use" and span.group == before.group:
                running[span.thread] = before
                continue
            if before is not None:
                yield before._replace(kind="compute", end=max(before.begin, span.begin))
            if span.kind == "use":
                running[span.thread] = span
        last = max([self.end, *(span.end for span in self.spans)])
        for before in running.values():
            yield before._replace(kind="compute", end=max(before.begin, last))

    def lanes(self) -> list[Lane]:
        """Return lanes of copies, as few as possible, and for each thread a lane of waits and of compute."""
        lanes = [
            Lane(f"{kind} {number}" if number > 1 else kind, "", spans)
            for kind in COPIES
            for number, spans in enumerate(_apart(self.of(kind)), start=1)
        ]
        of_threads = {"wait": list(self.of("wait")), "compute": list(self.compute())}
        for thread in dict.fromkeys(span.thread for span in self.of("use", "wait")):
            name = self.threads.get(thread, f"thread {thread}")
            for kind, every in of_threads.items():
                lanes.append(Lane(kind, name, [span for span in every if span.thread == thread]))
        return lanes


def _apart(spans: Iterator[Span]) -> list[list[Span]]:
    """Return spans in lists, as few as possible, in none of which two overlap."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.begin), None)
        if free is None:
            lanes.append(free := [])
        free.append(span)
    return lanes


def figures_of(session: Session) -> tuple[GroupFigures, ...]:
    """Return the figures of each group of a session's weights, in the order of use."""
    return tuple(map(GroupFigures.of, session.groups()))


class Recorder:
    """Records a session, and keeps the latest recording. Thread-safe."""

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session  # a function, because an install may get another session
        self._lock = threading.Lock()
        # LOCK: guards all below, and the session's `record`.
        self._current: object | None = None
        self._last: Recording | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Record while the block runs. Another recording that begins in the meantime discards this one."""
        with self._lock:
            current = self._current = object()
            self._last = None
            session = self._session()
            to_unix_ns, begin = _to_unix_ns(), time.monotonic_ns()
            session.record(True)
        try:
            yield
        finally:
            with self._lock:
                if self._current is current:
                    self._current = None
                    session.record(False)
                    self._last = _recording(session, begin, to_unix_ns)

    @property
    def last(self) -> Recording:
        """The latest recording. Raises ConfigError if there is none, or if it is still running."""
        if self._last is not None:
            return self._last
        if self._current is not None:
            raise ConfigError("the recording is still running: leave its `with` block first")
        raise ConfigError("nothing was recorded: run the model in `with handle.record():` first")


def _recording(session: Session, begin: int, to_unix_ns: int) -> Recording:
    end = time.monotonic_ns()
    timeline = session.timeline()
    # A thread has an id of Python and one of the system. Spans may have either.
    names = [
        (key, thread.name) for thread in threading.enumerate() for key in (thread.ident, thread.native_id)
    ]
    threads = {key: name for key, name in names if key is not None}
    spans = tuple(Span(*span) for span in timeline["spans"])
    return Recording(figures_of(session), spans, timeline["dropped"], begin, end, to_unix_ns, threads)


def _to_unix_ns() -> int:
    """Return the time since 1970 minus that of the monotonic clock, read as nearly at once as possible."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(8)]
    before, day, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return day - (before + after) // 2
