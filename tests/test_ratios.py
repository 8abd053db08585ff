"""The check of costs: what has moved, and how marks and dumps are read."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_scripts import run_script
from gauges import PythonCalls, _between_marks, _totals
from ratios import BYTES, INSTRUCTIONS, PYTHON, RATIO, compare


def baseline(**figures: Any) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"figures": {RATIO: {}, PYTHON: {}} | figures, "versions": versions}


def known(low: float, high: float) -> dict[str, float]:
    return {"low": low, "median": (low + high) / 2, "high": high, "n": 5}


@pytest.mark.parametrize(("now", "moved"), [(2.0, 0), (2.15, 0), (2.3, 1)])
def test_a_ratio_may_move_by_the_noise(now: float, moved: int) -> None:
    kept = baseline(**{RATIO: {"a": known(1.9, 2.0)}})
    assert compare({RATIO: {"a": now}}, kept, noise=0.1)[1] == moved


@pytest.mark.parametrize(("now", "moved"), [(6.9, 0), (7.0, 0), (7.1, 1)])
def test_a_count_may_not_grow(now: float, moved: int) -> None:
    kept = baseline(**{PYTHON: {"a": known(7.0, 7.0)}})
    assert compare({PYTHON: {"a": now}}, kept, noise=0.5)[1] == moved


@pytest.mark.parametrize(("now", "moved"), [(100.0, 0), (103.0, 0), (104.0, 1)])
def test_instructions_may_move_by_where_things_lie(now: float, moved: int) -> None:
    kept = baseline(**{INSTRUCTIONS: {"a": known(99.0, 100.0)}})
    assert compare({INSTRUCTIONS: {"a": now}}, kept, noise=0.5)[1] == moved


def test_counts_of_other_versions_are_not_compared() -> None:
    kept = baseline(**{PYTHON: {"a": known(7.0, 7.0)}, BYTES: {"b": known(8.0, 8.0)}})
    kept["versions"]["torch"] = "1.0"
    assert compare({PYTHON: {"a": 9.0}}, kept, noise=0)[1] == 0
    assert compare({BYTES: {"b": 9.0}}, kept, noise=0)[1] == 1, "bytes are of no version"


def test_calls_of_the_marked_thread_are_counted() -> None:
    log = """\
7 access("/dynswap-gauge/begin/a", F_OK) = -1 ENOENT (No such file or directory)
7 ioctl(3, _IOC(_IOC_READ, 0x66, 0x10, 0x60), 0x7ffe) = 0
8 ioctl(3, _IOC(_IOC_READ, 0x66, 0x10, 0x60), 0x7ffe) = 0
7 futex(0x7f, FUTEX_WAIT_PRIVATE, 2, NULL) = 0
7 pread64(3, "", 10, 0) = 0
7 access("/dynswap-gauge/end/a", F_OK) = -1 ENOENT (No such file or directory)
7 read(3, "", 10) = 0
7 access("/dynswap-gauge/begin/b", F_OK) = -1 ENOENT (No such file or directory)
7 access("/dynswap-gauge/end/b", F_OK) = -1 ENOENT (No such file or directory)"""
    assert _between_marks(log.splitlines()) == {"a": 2, "b": 0}


def test_dumps_are_added_up(tmp_path: Path) -> None:
    texts = ["desc: Trigger: Client Request: a\ntotals: 5\n"] * 2 + [
        "desc: Trigger: Program termination\ntotals: 9\n"
    ]
    files = [tmp_path / f"out.{number}" for number in range(3)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    assert _totals(files) == {"a": 10}


def test_python_calls_are_those_of_the_block() -> None:
    gauge = PythonCalls()
    for _ in range(3):
        with gauge():
            len("")
            len("")
    assert gauge.total == 6


@pytest.mark.slow
def test_it_runs() -> None:
    ran = run_script("ratios", "--tiny")
    assert ran.returncode == 0, ran.stderr
    assert "read in a forward, streamed" in ran.stdout and "noise of this run" in ran.stdout
