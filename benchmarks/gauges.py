"""Gauges of a piece of work: seconds, which are noisy, and counts, which are not.

strace and valgrind count system calls and instructions from outside the process. Only those of the calling
thread count, since those of other threads depend on when they run. Valgrind has no userfaultfd, so masters
are sampled under it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: System calls whose number depends on what other threads are doing.
_WAITS: Final = {"futex", "sched_yield", "clock_nanosleep", "nanosleep", "madvise", "munmap", "mmap", "brk"}
#: The calls that end a block: of `__exit__`, of `next`, of the generator and of `setprofile`.
_OF_THE_BLOCK: Final = 4
_MARK: Final = "/dynswap-gauge/"
_TOGGLE: Final = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


class Seconds:
    """Adds up the time of the blocks that it is used for, in `total`."""

    def __init__(self) -> None:
        self.total = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.total += time.perf_counter() - begun


class PythonCalls:
    """Counts the calls of Python and C functions that Python code makes in a block."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        counted = 0

        def count(_: object, event: str, __: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.total += counted - _OF_THE_BLOCK


class Marks:
    """Marks where a block begins and ends, for `system_calls`."""

    def __init__(self, name: str) -> None:
        self._name = name

    @contextmanager
    def __call__(self) -> Iterator[None]:
        os.access(f"{_MARK}begin/{self._name}", os.F_OK)
        yield
        os.access(f"{_MARK}end/{self._name}", os.F_OK)


class Toggle:
    """Lets valgrind count instructions in a block, for `instructions`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._library = ctypes.CDLL(os.environ["GAUGES_TOGGLE"])

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._library.begin()
        yield
        self._library.end(self._name.encode())


def system_calls(command: list[str]) -> dict[str, int] | None:
    """Run a command that uses `Marks`. Return the number of system calls in each block, by its name.

    None if strace is not installed.
    """
    if shutil.which("strace") is None:
        return None
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
        subprocess.run(["strace", "-f", "-qq", "-o", log.name, *command], check=True)
        return _between_marks(log.read().splitlines())


def _between_marks(lines: list[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    thread, name = "", None
    for line in lines:
        mark = re.search(rf'"{_MARK}(begin|end)/([^"]*)"', line)
        if mark:
            thread, name = line.split()[0], mark[2] if mark[1] == "begin" else None
            counts[mark[2]] += 0
        elif name is not None and (call := re.match(rf"{thread}\s+(\w+)\(", line)) and call[1] not in _WAITS:
            counts[name] += 1
    return dict(counts)


def instructions(command: list[str]) -> dict[str, int] | None:
    """Run a command that uses `Toggle`. Return the number of instructions in each block, by its name.

    None if valgrind or its headers are not installed.
    """
    if shutil.which("valgrind") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "toggle.c", Path(folder) / "toggle.so"
        source.write_text(_TOGGLE)
        built = subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=False, capture_output=True
        )
        if built.returncode:
            return None
        counted = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes"]
        out = f"--callgrind-out-file={folder}/out"
        # Python looks names up by their hashes, so the hashes have to be the same in each run.
        environment = {**os.environ, "GAUGES_TOGGLE": str(library), "PYTHONHASHSEED": "0"}
        subprocess.run(
            [*counted, out, "--quiet", *command], check=True, env=environment, stderr=subprocess.DEVNULL
        )
        return _totals(sorted(Path(folder).glob("out*-01")))


def _totals(files: list[Path]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for file in files:
        text = file.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if name and total:
            counts[name[1]] += int(total[1])
    return dict(counts)
