"""Writes a recording as a Chrome trace, on the clock of torch.profiler.

Note [The clock of a trace]
torch.profiler exports times in microseconds since 1970, minus ``baseTimeNanoseconds``. This base is a
multiple of three months, so that microseconds keep their fractions in a double. Perfetto takes times of JSON
files as they are, so two files that are opened together have to count from the same moment. Therefore the
base is computed here as in torch.profiler. If a file of torch.profiler is merged, its base is used.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Final

from dynswap_ext._util.name_patterns import label_of
from dynswap_ext._util.warn import warn
from dynswap_ext._util.written_files import check_folder, explained
from dynswap_ext._version import __version__
from dynswap_ext.errors import ConfigError
from dynswap_ext.profile.recording import CAUSES, COPIES, SAVED_TENSORS, GroupFigures, Recording, Span

#: Seconds of three months, as in torch.profiler: Note [The clock of a trace].
_BASE_STEP_S: Final = 7_889_238
#: This is added to the id of the process, so that the rows of torch.profiler for this process stay apart.
_PID: Final = 1 << 23


def write_trace(
    recording: Recording, path: str | PathLike[str], profiler: str | PathLike[str] | None = None
) -> None:
    """Write a recording as a Chrome trace, with the events of a `profiler` trace, as `Handle.trace` does."""
    where = check_folder(path, "trace")
    if profiler is None:
        content = as_trace(recording)
    else:
        content = _read(Path(profiler))
        own = as_trace(recording, base_ns=content["baseTimeNanoseconds"])
        _compare_times(content, recording, profiler)
        content["traceEvents"] = [*content["traceEvents"], *own["traceEvents"]]
        content["dynswap_ext"] = own["dynswap_ext"]
    text = json.dumps(content, separators=(",", ":"))
    data = text.encode()
    with explained(where):
        where.write_bytes(gzip.compress(data, compresslevel=6) if where.name.endswith(".gz") else data)


def as_trace(recording: Recording, *, base_ns: int | None = None) -> dict[str, Any]:
    """Return a recording in the format of Chrome traces.

    `base_ns` is the moment that counts as zero, in nanoseconds since 1970. Default: as in torch.profiler.
    """
    if base_ns is None:
        base_ns = int(time.time()) // _BASE_STEP_S * _BASE_STEP_S * 10**9
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "dynswap_ext": {"version": __version__, "dropped_spans": recording.dropped},
        "traceEvents": list(_events(recording, base_ns)),
    }


def _events(recording: Recording, base_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace: spans by lane, marks where passes begin, and the bytes on the device."""
    labels = [label_of(group.names) for group in recording.groups]
    pid = _PID + os.getpid()

    def at(monotonic_ns: int) -> float:
        return (monotonic_ns + recording.to_unix_ns - base_ns) / 1000

    def named(what: str, tid: int, name: str) -> Iterator[dict[str, Any]]:
        common = {"ph": "M", "pid": pid, "tid": tid, "ts": at(recording.begin)}
        yield {"name": f"{what}_name", **common, "args": {"name": name}}
        yield {"name": f"{what}_sort_index", **common, "args": {"sort_index": tid}}

    yield from named("process", 0, "dynswap_ext")
    for tid, lane in enumerate(recording.lanes(), start=1):
        yield from named("thread", tid, f"{lane.kind} ({lane.thread})" if lane.thread else lane.kind)
        for span in lane.spans:
            label = labels[span.group]
            yield {
                "ph": "X",
                "cat": f"dynswap,{span.kind}",
                "name": f"{span.detail}: {label}" if span.kind == "wait" else label,
                "pid": pid,
                "tid": tid,
                "ts": at(span.begin),
                # From the rounded times, because the next span may begin where this one ends.
                "dur": at(span.end) - at(span.begin),
                "args": _details(span, recording.groups[span.group]),
            }
    common = {"pid": pid, "cat": "dynswap"}
    for number, span in enumerate(recording.of("pass"), start=1):
        # "s": "p" is a mark across all rows of the process.
        yield {"ph": "i", "s": "p", "name": f"pass {number}", "tid": 0, "ts": at(span.begin), **common}
    saves = any(span.saved_bytes for span in recording.of("use"))
    for span in recording.of("use"):
        held = {"bytes": span.bytes}
        yield {"ph": "C", "name": "device bytes", "ts": at(span.begin), **common, "args": held}
        if saves:
            held = {"bytes": span.saved_bytes}
            yield {"ph": "C", "name": SAVED_TENSORS, "ts": at(span.begin), **common, "args": held}


def _details(span: Span, group: GroupFigures) -> dict[str, Any]:
    details: dict[str, Any] = {"group": span.group, "weights": ", ".join(group.names)}
    if span.kind == "wait":
        details.update({"cause": span.detail, "meaning": CAUSES[span.detail]})
    if span.kind in COPIES:
        details["bytes"] = span.bytes
        if span.kind == "copy":
            details.update({"source": group.source, "issued": span.detail})
        else:
            details["to"] = group.source
        if span.end > span.begin:
            details["GB/s"] = round(span.bytes / (span.end - span.begin), 3)
    return details


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        trace = json.loads(content)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"profiler is {path}, which cannot be read as a trace: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ConfigError(
            f"profiler is {path}, which has no list of traceEvents; expected what torch.profiler's "
            "export_chrome_trace() writes"
        )
    base = trace.setdefault("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise ConfigError(f"profiler is {path}, whose baseTimeNanoseconds is {base!r}; expected a number")
    return trace


def _compare_times(trace: dict[str, Any], recording: Recording, path: str | PathLike[str]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    shift = recording.to_unix_ns - trace["baseTimeNanoseconds"]
    begin, end = ((at + shift) / 1000 for at in (recording.begin, recording.end))
    if times and (max(times) < begin or min(times) > end):
        warn(
            f"{path} has nothing of the time that was recorded: record and profile the same run, as in "
            "`with profile() as profiler, handle.record():`"
        )
