"""A benchmark's record keeps medians and their spread, and no raw samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import ROOT

import records  # isort: skip

RESULTS = ROOT / "benchmarks" / "results"


def sample(median: float, low: float, high: float, n: int) -> dict[str, float]:
    return {"median": median, "low": low, "high": high, "n": n}


@pytest.mark.parametrize(
    ("figures", "kept"),
    [
        ([3.0, 1.0, 8.0], sample(3, 1, 8, 3)),
        ([1.0], sample(1, 1, 1, 1)),
        ([], []),
        (["a", "a"], ["a", "a"]),
        (0.123456789, 0.123457),
        (1155253862.4, 1155250000.0),
        (113324032.0, 113324032),
        (None, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": sample(1.5, 1, 2, 2)}}),
        ([{"seconds": [1.0, 2.0, 9.0], "bytes": 7}], {"seconds": sample(2, 1, 9, 3), "bytes": 7}),
        (
            [
                {"seconds": [1.0, 2.0, 9.0], "bytes": 7, "state": "ok", "failure": ""},
                {"seconds": [4.0], "bytes": 8, "state": "ok", "failure": "late", "more": 1},
            ],
            {
                "seconds": sample(3, 2, 4, 2),
                "bytes": sample(7.5, 7, 8, 2),
                "state": "ok",
                "failure": ["", "late"],
                "more": 1,
            },
        ),
        ([[1.0, 3.0], [5.0]], sample(3.5, 2, 5, 2)),
        ([(1.0, 3.0), (5.0,)], sample(3.5, 2, 5, 2)),
        ([{"a": None}, {"a": 2}], {"a": 2}),
        (
            {"script": "x", "figures": {"a": [1]}, "bars": []},
            {"script": "x", "figures": {"a": [1]}, "bars": []},
        ),
    ],
)
def test_summary(figures: Any, kept: Any) -> None:
    assert records.summary(figures) == kept


def test_lines_are_filled_and_it_is_json() -> None:
    value = {
        "short": {"a": 1, "b": [1, 2]},
        "numbers": {f"number {number}": number / 7 for number in range(30)},
        "list": [{"name": "x" * 60, "value": number} for number in range(3)],
        "nothing": {},
        "last": None,
    }
    text = records.as_json(value)
    assert json.loads(text) == value
    assert max(map(len, text.splitlines())) <= 112
    assert len(text.splitlines()) < 25  # one item a line would be 45


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_records_are_summaries(path: Path) -> None:
    record = json.loads(path.read_text())
    assert records.summary(record["figures"]) == record["figures"]
    assert record["complete" if "complete" in record else "bars"] and record["machine"]["processor"]
    assert path.read_text() == records.as_json(record) + "\n"
