"""The contents of a record: medians with their spread, in a file that can be read and compared."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_WIDTH = 110
_DIGITS = 6


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one thing: median, lowest, highest and number."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        return cls(statistics.median(values), min(values), max(values), len(values))


def is_record(value: Any) -> bool:
    """Return whether `common.Record` wrote the value."""
    kinds = {"script": str, "figures": dict, "bars": list}
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in kinds.items())


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def summary(value: Any) -> Any:
    """Return figures without raw samples, and with six digits of each.

    A list of numbers becomes a `Sample` as a dict. A list of dicts is one thing that was measured several
    times, and becomes one dict: values that never differ are given once, numbers that differ become a
    `Sample`, and lists of numbers a `Sample` of their medians.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return value if is_record(value) else {key: summary(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and value:
        if all(map(is_number, value)):
            return summary(dataclasses.asdict(Sample.of(value)))
        if all(isinstance(each, (list, tuple, dict)) for each in value):
            return _together(value)
    return value


def _together(values: Sequence[Any]) -> Any:
    values = [each for each in values if each is not None]
    if len(values) < 2:
        return summary(values[0]) if values else None
    if all(isinstance(each, dict) for each in values):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: _together([each[key] for each in values if key in each]) for key in keys}
    medians = [
        statistics.median(each) if isinstance(each, (list, tuple)) and each else each for each in values
    ]
    if all(each == medians[0] for each in medians):
        return summary(medians[0])
    return summary(medians)


def as_json(value: Any, indent: int = 0) -> str:
    """Return JSON with as many items on a line as fit."""
    text = json.dumps(value, default=str)
    if not isinstance(value, (dict, list)) or len(text) + indent <= _WIDTH:
        return text
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {as_json(each, indent + 1)}" for key, each in value.items()]
    else:
        items = [as_json(each, indent + 1) for each in value]
    lines = [items[0]]
    for before, item in pairwise(items):
        alone = "\n" in item or "\n" in before
        if alone or indent + len(lines[-1]) + len(item) + 3 > _WIDTH:
            lines.append(item)
        else:
            lines[-1] += f", {item}"
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    pad = " " * (indent + 1)
    return f"{opening}\n{pad}" + f",\n{pad}".join(lines) + f"\n{' ' * indent}{closing}"


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, so that an interruption leaves the old file or the new one."""
    other = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        other.write_text(text)
        os.replace(other, path)
    finally:
        other.unlink(missing_ok=True)
