"""A recording as a Chrome trace, on the clock of torch.profiler.

Note [The clock of a trace]
torch.profiler exports times since 1970, in microseconds less ``baseTimeNanoseconds``: a multiple of three
months, so that microseconds keep their fractions in a double. Perfetto takes times of JSON files as they
are, and two files that are opened together have to count from the same moment. So the base here is the same,
computed in the same way. With a file to merge, it is the base that the file names.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from os import PathLike
from pathlib import Path
from typing import Any, Final

from dynswap_ext._util.figure import check_folder
from dynswap_ext._util.name_patterns import label_of
from dynswap_ext._util.warn import warn
from dynswap_ext._version import __version__
from dynswap_ext.errors import ConfigError
from dynswap_ext.profile.recording import Recording, Span

__all__ = ["as_trace", "write_trace"]

#: See Note [The clock of a trace].
_BASE_STEP_S: Final = 7_889_238
#: Above the ids that processes have, so that torch's rows of this process stay apart.
_PID: Final = 1 << 23


def write_trace(
    recording: Recording, path: str | PathLike[str], profiler: str | PathLike[str] | None = None
) -> None:
    """Write a recording as a Chrome trace; see `Handle.trace`."""
    where = check_folder(path, "trace")
    if profiler is None:
        content = as_trace(recording)
    else:
        content = _read(Path(profiler))
        own = as_trace(recording, base_ns=_base_of(content, profiler))
        _compare_times(content, recording, profiler)
        content["traceEvents"] = [*content["traceEvents"], *own["traceEvents"]]
        content["dynswap_ext"] = own["dynswap_ext"]
    text = json.dumps(content, separators=(",", ":"))
    if where.name.endswith(".gz"):
        where.write_bytes(gzip.compress(text.encode(), compresslevel=6))
    else:
        where.write_text(text)


def as_trace(recording: Recording, *, base_ns: int | None = None) -> dict[str, Any]:
    """Return a recording in the format of Chrome traces.

    Parameters
    ----------
    recording
        What was recorded.
    base_ns
        The moment that counts as zero, in nanoseconds since 1970. Default: as in torch.profiler.
    """
    if base_ns is None:
        base_ns = int(time.time()) // _BASE_STEP_S * _BASE_STEP_S * 10**9
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "dynswap_ext": {"version": __version__, "dropped_spans": recording.dropped},
        "traceEvents": _Events(recording, base_ns).made,
    }


class _Events:
    """Makes the events of a trace."""

    def __init__(self, recording: Recording, base_ns: int) -> None:
        self._recording = recording
        self._shift = recording.to_unix_ns - base_ns
        self._labels = [label_of(group.names, most=2) for group in recording.groups]
        self._pid = _PID + os.getpid()
        self.made: list[dict[str, Any]] = []
        self._about("process", 0, "dynswap_ext", 0)
        for number, lane in enumerate(recording.lanes(), start=1):
            copies = f"copy {number}" if number > 1 else "copy"
            self._lane(number, f"{lane.kind} ({lane.thread})" if lane.thread else copies, lane.spans)
        self._marks()

    def _about(self, what: str, tid: int, name: str, order: int) -> None:
        common = {"ph": "M", "pid": self._pid, "tid": tid, "ts": self._at(self._recording.begin)}
        self.made += [
            {"name": f"{what}_name", **common, "args": {"name": name}},
            {"name": f"{what}_sort_index", **common, "args": {"sort_index": order}},
        ]

    def _lane(self, number: int, name: str, spans: list[Span]) -> None:
        self._about("thread", number, name, number)
        for span in spans:
            label = self._labels[span.group]
            self.made.append(
                {
                    "ph": "X",
                    "cat": f"dynswap,{span.kind}",
                    "name": f"{span.detail}: {label}" if span.kind == "wait" else label,
                    "pid": self._pid,
                    "tid": number,
                    "ts": self._at(span.begin),
                    # From the rounded times: the next span may begin where this one ends.
                    "dur": self._at(span.end) - self._at(span.begin),
                    "args": self._details(span),
                }
            )

    def _details(self, span: Span) -> dict[str, Any]:
        group = self._recording.groups[span.group]
        details: dict[str, Any] = {"group": span.group, "weights": ", ".join(group.names)}
        if span.kind == "wait":
            details["cause"] = span.detail
        if span.kind == "copy":
            details.update({"bytes": span.bytes, "source": group.source, "issued": span.detail})
            if span.end > span.begin:
                details["GB/s"] = round(span.bytes / (span.end - span.begin), 3)
        return details

    def _marks(self) -> None:
        """Mark where passes begin, and count the bytes on the device."""
        common = {"pid": self._pid, "cat": "dynswap"}
        for number, span in enumerate(self._recording.of("pass"), start=1):
            # Across the whole process's rows.
            mark = {"ph": "i", "s": "p", "name": f"pass {number}", "tid": 0, "ts": self._at(span.begin)}
            self.made.append({**mark, **common})
        for span in self._recording.of("use"):
            count = {"ph": "C", "name": "device bytes", "ts": self._at(span.begin)}
            self.made.append({**count, **common, "args": {"bytes": span.bytes}})

    def _at(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self._shift) / 1000


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        trace = json.loads(content)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"profiler is {path}, which cannot be read as a trace: {error}") from error
    if isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list):
        return trace
    raise ConfigError(
        f"profiler is {path}, which has no list of traceEvents; expected what torch.profiler's "
        "export_chrome_trace() writes"
    )


def _base_of(trace: dict[str, Any], path: str | PathLike[str]) -> int:
    base = trace.get("baseTimeNanoseconds", 0)
    if isinstance(base, int):
        return base
    raise ConfigError(f"profiler is {path}, whose baseTimeNanoseconds is {base!r}; expected a number")


def _compare_times(trace: dict[str, Any], recording: Recording, path: str | PathLike[str]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    shift = recording.to_unix_ns - _base_of(trace, path)
    begin, end = ((at + shift) / 1000 for at in (recording.begin, recording.end))
    if times and (max(times) < begin or min(times) > end):
        warn(
            f"{path} has nothing of the time that was recorded: record and profile the same run, as in "
            "`with profile() as profiler, handle.record():`"
        )
