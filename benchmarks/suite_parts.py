"""Runs parts of a suite. Each is a process with its own share of the time, which it cannot exceed.

A part's output goes to a file. At its limit its process group is killed, and what it had written by then is
kept. See gpu_suite.py for the parts themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_TAIL = 8000  # characters of a part's output that the record keeps
_GRACE = 6.0  # seconds for a process that was told to stop

OK, BARS, FAILED, LATE = "ok", "bars missed", "failed", "out of time"
STOPPED, SKIPPED = "stopped", "skipped"


@dataclass(frozen=True)
class Part:
    """One part of a suite: its commands, its share of the time, and what it needs."""

    name: str
    commands: tuple[list[str], ...]  #: one after the other; the first that fails ends the part
    share: float  #: of the time, relative to the shares of the other parts
    record: str = ""  #: the option that takes the path of its JSON
    limit: str = ""  #: the option that takes its seconds
    environment: dict[str, str] = field(default_factory=dict)
    missing: str = ""  #: why it cannot run here
    shows: tuple[str, ...] = ()  #: parts of the names of bars that go into the summary
    line: str = ""  #: a part of the line of the output that goes there, where there are no bars


@dataclass
class Result:
    """The result of a part."""

    state: str
    command: str
    status: int | None = None
    seconds: float = 0.0
    limit_seconds: float = 0.0
    output: str = ""
    record: dict[str, Any] | None = None
    reason: str = ""


class Stopped(BaseException):
    """A signal has told the suite to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_on_signals() -> None:
    """Let the first SIGTERM or SIGINT raise `Stopped`.

    Later ones are ignored, so that results can be written.
    """

    def stop(number: int, _: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)


def limit_of(part: Part, later: Sequence[Part], remaining: float) -> float:
    """Return the seconds for a part: its share of what remains, including what earlier parts left over."""
    if part.missing:
        return 0.0
    waiting = sum(each.share for each in (part, *later) if not each.missing)
    return max(0.0, remaining) * part.share / waiting


class Runner:
    """Runs parts, and remembers the running one, so that an interrupted suite can keep its result."""

    def __init__(self) -> None:
        self.under_way: tuple[Part, Result] | None = None

    def run(self, part: Part, limit: float) -> Result:
        """Run a part for `limit` seconds at most.

        If `Stopped` is raised, `under_way` has the part's result.
        """
        result = Result(STOPPED, "; ".join(map(shlex.join, part.commands)), limit_seconds=round(limit, 1))
        if part.missing:
            result.state, result.reason = SKIPPED, part.missing
            return result
        self.under_way = part, result
        with tempfile.TemporaryDirectory() as folder:
            output, record = Path(folder, "output"), Path(folder, "record.json")
            start = time.perf_counter()
            try:
                for command in part.commands:
                    left = limit - (time.perf_counter() - start)
                    result.status = self._process(part, command, left, output, record)
                    if result.status != 0:
                        break
            finally:
                result.seconds = round(time.perf_counter() - start, 1)
                result.output = _tail(output)
                result.record = _read(record)
        _judge(part, result)
        self.under_way = None
        return result

    def _process(self, part: Part, command: list[str], limit: float, output: Path, record: Path) -> int:
        """Run one process; return its status, or 124 if it ran out of time."""
        more = [part.record, str(record)] if part.record else []
        if part.limit:
            more += [part.limit, f"{max(1.0, limit - _grace(limit) - 2):.0f}"]
        with output.open("ab") as file:
            try:
                process = subprocess.Popen(
                    [*command, *more],
                    cwd=ROOT,
                    env=environment(part),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a group of its own, which is killed as one
                    preexec_fn=_heed_interrupts,
                )
            except OSError as error:
                file.write(f"cannot start: {error}\n".encode())
                return 127
            try:
                return process.wait(max(0.0, limit - _grace(limit)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest prints its results, scripts end their children
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_grace(limit))
                return 124
            finally:
                _end(process)


def environment(part: Part) -> dict[str, str]:
    """Return a part's environment: the suite's, this checkout first, and tools next to the interpreter."""
    made = os.environ | part.environment
    made["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    made["PYTHONUNBUFFERED"] = "1"  # nothing that was printed is lost if the part is killed
    tools = str(Path(sys.executable).parent)
    made["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), tools]))
    return made


def _heed_interrupts() -> None:
    """Let SIGINT stop the part. Jobs that a script starts in the background would ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _grace(limit: float) -> float:
    return min(_GRACE, 0.2 * max(0.0, limit))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process group. Do not wait forever for what the kernel holds."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _judge(part: Part, result: Result) -> None:
    missed = [bar["name"] for bar in bars_of(result.record) if not bar["reached"]]
    if result.status == 0:
        result.state = OK
    elif result.status == 124:
        result.state, result.reason = LATE, f"ended after {result.limit_seconds:g} s"
    elif result.status == 1 and missed and (result.record or {}).get("complete", True):
        result.state, result.reason = BARS, "; ".join(missed)
    else:
        result.state, result.reason = FAILED, last_line(result.output) or f"status {result.status}"
    if part.record and result.record is None and result.state == OK:
        result.state, result.reason = FAILED, "it wrote no record"


def bars_of(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the bars of a part's record. A record that is cut short or of another form has none."""
    bars = (record or {}).get("bars", [])
    return [bar for bar in bars if isinstance(bar, dict) and {"name", "value", "reached"} <= bar.keys()]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-_TAIL:].decode(errors="replace")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
