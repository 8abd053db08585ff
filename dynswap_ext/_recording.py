"""What sessions tell of groups and of time, as values; and the context that records."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, Protocol

from .errors import ConfigError

__all__ = ["CAUSES", "GroupFigures", "Recorder", "Recording", "Span", "figures_of"]

#: Why somebody stalled.
CAUSES: Final = (
    "first use",
    "bus-bound",
    "late prefetch",
    "not predicted",
    "arena full",
    "slot held",
    "master changed",
)


@dataclass(frozen=True)
class GroupFigures:
    """What one group has cost so far. Bytes are bytes; times are nanoseconds.

    Of the pure-Python provider every weight is a group.
    """

    #: Its weights, as ``named_parameters()`` and ``named_buffers()`` have them.
    names: tuple[str, ...]
    #: On the device.
    bytes: int
    #: Where its masters are: "pinned RAM", "RAM" or "file"; "device" if they are on one, and are cast there.
    source: str
    #: Whether it stays on the device.
    resident: bool
    #: How often it was on the device, or on its way, when it was needed; and of those, not there yet.
    hits: int
    late_hits: int
    #: How often its copy was issued only when it was needed.
    misses: int
    copies: int
    #: Read from masters by those copies.
    bytes_moved: int
    #: How long its copies took; None where the backend does not know (CUDA, while nothing is recorded).
    copy_ns: int | None
    #: How long its consumers waited.
    stall_ns: int
    #: The same by cause, one of `CAUSES`.
    causes: Mapping[str, int]
    #: The weight whose handed-out tensor held the slot that this group waited for, the last time; or "".
    held_by: str

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GroupFigures:
        """Build from what a session gives of one group; what it does not give is an error."""
        values = {field.name: given[field.name] for field in fields(cls)}
        values["names"] = tuple(values["names"])
        values["causes"] = MappingProxyType({cause: ns for cause, ns in values["causes"].items() if ns})
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """The same in what JSON knows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "names": list(self.names), "causes": dict(self.causes)}


class Span(NamedTuple):
    """One thing that took time, in nanoseconds of ``time.monotonic_ns``."""

    #: "copy", "wait", "use" (of a group, from `begin` on; its `end` is its `begin`), or "pass" (as "use").
    kind: str
    #: An index into the recording's groups; -1 for a pass.
    group: int
    begin: int
    end: int
    #: Of a copy "demanded" or "prefetched", of a wait its cause.
    detail: str
    #: Of a copy what it brings; of a use what is held on the device at that time.
    bytes: int
    #: The consumer's; 0 for a copy.
    thread: int


@dataclass(frozen=True)
class Recording:
    """What happened while something was recorded."""

    groups: tuple[GroupFigures, ...]
    #: In the order of their begin.
    spans: tuple[Span, ...]
    #: Spans that did not fit.
    dropped: int
    #: When it began and ended, as ``time.monotonic_ns`` has it.
    begin: int
    end: int
    #: What makes nanoseconds since 1970 of those.
    to_unix_ns: int
    #: What the threads were called, by the ids that the spans have.
    threads: Mapping[int, str]

    def of(self, *kinds: str) -> Iterator[Span]:
        """The spans of these kinds."""
        return (span for span in self.spans if span.kind in kinds)

    def compute(self) -> Iterator[Span]:
        """From each use to the thread's next use or wait: when the group was computed with."""
        running: dict[int, Span] = {}
        for span in self.spans:
            if span.kind == "copy":
                continue
            before = running.get(span.thread)
            if before is not None and span.kind == "use" and span.group == before.group:
                continue
            if before is not None:
                yield before._replace(kind="compute", end=max(before.begin, span.begin))
                del running[span.thread]
            if span.kind == "use":
                running[span.thread] = span
        last = max(self.end, *(span.end for span in self.spans), 0) if self.spans else self.end
        for before in running.values():
            yield before._replace(kind="compute", end=max(before.begin, last))


class Records(Protocol):
    """What a session has for it."""

    def groups(self) -> list[dict[str, Any]]:
        """Figures of each group, in the order of use."""

    def record(self, on: bool) -> None:
        """Begin, dropping what was recorded, or end."""

    def timeline(self) -> dict[str, Any]:
        """What was recorded."""


def figures_of(session: Records) -> tuple[GroupFigures, ...]:
    """Figures of each group, in the order of use."""
    return tuple(map(GroupFigures.of, session.groups()))


class Recorder:
    """Records a session, and keeps what was recorded last. Thread-safe.

    Parameters
    ----------
    session
        The session as it is by then: an install may get another one.
    """

    def __init__(self, session: Callable[[], Records]) -> None:
        self._session = session
        self._lock = threading.Lock()
        # LOCK: guards all below, and the session's `record`.
        self._current: InRecording | None = None
        self._last: Recording | None = None

    def __call__(self) -> InRecording:
        """Return a context to record in."""
        return InRecording(self)

    @property
    def last(self) -> Recording:
        """What was recorded last.

        Raises
        ------
        ConfigError
            Nothing was.
        """
        if self._last is None:
            running = self._current is not None
            raise ConfigError(
                "the recording is still running: leave its `with` block first"
                if running
                else "nothing was recorded: run the model in `with handle.record():` first"
            )
        return self._last

    def _begin(self, context: InRecording) -> None:
        with self._lock:
            self._current, self._last = context, None
            context.session = self._session()
            context.to_unix_ns = _to_unix_ns()
            context.begin = time.monotonic_ns()
            context.session.record(True)

    def _end(self, context: InRecording) -> None:
        with self._lock:
            if self._current is not context:
                return  # another has begun since, and dropped what this one had
            self._current = None
            session = context.session
            session.record(False)
            end = time.monotonic_ns()
            timeline = session.timeline()
            groups = figures_of(session)
            # By both of the ids that a thread has.
            threads = {
                key: thread.name
                for thread in threading.enumerate()
                for key in (thread.ident, thread.native_id)
                if key is not None
            }
            spans = tuple(Span(*span) for span in timeline["spans"])
            self._last = Recording(
                groups, spans, timeline["dropped"], context.begin, end, context.to_unix_ns, threads
            )


class InRecording:
    """One ``with handle.record():``."""

    session: Records
    begin: int
    to_unix_ns: int

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder._end(self)


def _to_unix_ns() -> int:
    """The time of day less the monotonic clock, read together as closely as can be."""
    best = None
    for _ in range(8):
        before = time.monotonic_ns()
        day = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = after - before, day - (before + after) // 2
    assert best is not None
    return best[1]
