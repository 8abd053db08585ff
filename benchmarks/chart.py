"""Draws README's chart from benchmarks/results/peers.json: the time of a call against the memory it takes.

The workload is one whose weights are in a file that is not in the page cache. The limit is the least time
for an amount of memory. All memory but that of the activations keeps weights, and the others are read from
disk: max(time of the resident model, bytes to read / the fastest read from the disk in the whole run).

`python benchmarks/figures.py` writes the pictures, one for light pages and one for dark ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

WORKLOAD, SHOWN = "diffusion", "FLUX.1's transformer"
#: The rows of the record that are drawn, and their labels.
LABELS = {
    "resident": "resident model",
    "ours, all resident": "dynswap, room for all",
    "ours, 1/2": "dynswap, budget 1/2",
    "ours, 1/4": "dynswap, budget 1/4",
    "mapped, untouched": "mapped file, untouched",
    "classic hook": "DynamicSwapInstaller",
    "accelerate disk_offload": "accelerate disk_offload",
    "accelerate load_checkpoint_and_dispatch": "accelerate load_checkpoint_and_dispatch",
    "diffusers group offload, leaf": "diffusers group offload, leaf",
    "diffusers group offload, block": "diffusers group offload, block",
    "compressed-tensors offload": "compressed-tensors offload",
}
THEMES = {
    "light": {
        "page": "#ffffff", "text": "#1f2328", "faint": "#59636e", "grid": "#e6eaef",
        "ours": "#0072B2", "peer": "#B34700",
    },
    "dark": {
        "page": "#0d1117", "text": "#f0f6fc", "faint": "#9198a1", "grid": "#262c36",
        "ours": "#56B4E9", "peer": "#E69F00",
    },
}  # fmt: skip
_COLOURS = {"ours": "ours", "peer": "peer", "reference": "text"}

_WIDTH, _HEIGHT, _FONT = 860, 500, 13
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 842, 96, 446
_CHARACTER = 0.56 * _FONT  #: a little more than the average width
_STEP = 50  #: of both axes, in ms and in MB
_MARK, _LINE, _SPREAD = 10, 3, 2  #: how bad it is to write over them


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


Point = tuple[float, float]


@dataclass(frozen=True)
class Limit:
    """The least time of a call, in seconds, for each amount of memory."""

    compute: float
    weight_bytes: float
    other_bytes: float  #: activations, and the like
    bytes_per_second: float

    @classmethod
    def of(cls, record: dict[str, Any]) -> Limit:
        sections = [places["file"] for places in record["figures"].values() if "file" in places]
        rates = [section["bandwidth"] or 0.0 for section in sections]
        for section in sections:
            rows = [row for row in section["rows"].values() if row.get("moved_bytes")]
            rates += [row["moved_bytes"] / row["seconds"]["median"] for row in rows]
        section = record["figures"][WORKLOAD]["file"]
        resident = section["rows"]["resident"]
        other = max(0, resident["peak_bytes"] - section["weight_bytes"])
        return cls(resident["seconds"]["median"], section["weight_bytes"], other, max(rates))

    def at(self, memory: float) -> float:
        """Return the least seconds of a call with that much memory, in bytes.

        It is `other_bytes` at least.
        """
        return max(self.compute, (self.weight_bytes + self.other_bytes - memory) / self.bytes_per_second)

    @property
    def knee(self) -> float:
        """Return the bytes of memory from which on compute is the limit."""
        all_bytes = self.weight_bytes + self.other_bytes
        return max(self.other_bytes, all_bytes - self.compute * self.bytes_per_second)


def draw(record: dict[str, Any], theme: str) -> str:
    """Return the chart as SVG."""
    return _Chart(record, THEMES[theme]).svg()


class _Chart:
    def __init__(self, record: dict[str, Any], colours: dict[str, str]) -> None:
        self._colours, self._machine = colours, record["machine"]
        self._section = record["figures"][WORKLOAD]["file"]
        self._limit = Limit.of(record)
        rows = self._section["rows"]
        self._rows = {name: rows[name] for name in LABELS if "seconds" in rows.get(name, {})}
        slowest = max(row["seconds"]["high"] for row in self._rows.values())
        largest = max(row["peak_bytes"] for row in self._rows.values())
        self._most_ms = math.ceil(slowest * 1e3 / _STEP) * _STEP
        self._most_mb = math.ceil(largest / 1e6 / _STEP + 0.5) * _STEP
        self._parts: list[str] = []
        self._taken: list[tuple[Box, int]] = []  #: with what it costs to write there

    def svg(self) -> str:
        font = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="{font}" font-size="{_FONT}">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{self._colours["page"]}"/>',
        ]
        self._head()
        self._axes()
        points = {name: self._point(row) for name, row in self._rows.items()}
        knee, compute = self._limit.knee, self._limit.compute
        corners = [
            self._at(self._limit.other_bytes, self._limit.at(self._limit.other_bytes)),
            self._at(knee, compute),
            self._at(self._most_mb * 1e6, compute),
        ]
        self._path(corners, "faint", ' stroke-dasharray="3 5"')
        ours = [name for name, row in self._rows.items() if row["kind"] == "ours"]
        self._path(sorted(points[name] for name in ours), "ours")
        for name, point in points.items():
            self._mark(point, self._rows[name])
        rate = self._limit.bytes_per_second / 1e9
        self._label(f"limit, at {rate:.1f} GB/s from the disk", "faint", self._at(knee / 2, compute))
        for name in [*ours, *(name for name in points if name not in ours)]:
            row = self._rows[name]
            words = f"{LABELS[name]}: {row['seconds']['median'] * 1e3:.0f} ms"
            self._label(words, _COLOURS[row["kind"]], points[name])
        return "\n".join([*self._parts, "</svg>"]) + "\n"

    def _at(self, memory: float, seconds: float) -> Point:
        x = _LEFT + (_RIGHT - _LEFT) * memory / (self._most_mb * 1e6)
        return x, _BOTTOM - (_BOTTOM - _TOP) * seconds * 1e3 / self._most_ms

    def _point(self, row: dict[str, Any], which: str = "median") -> Point:
        return self._at(row["peak_bytes"], row["seconds"][which])

    def _head(self) -> None:
        title = f"Time of a {self._section['unit']} against peak memory"
        where = ", ".join(self._machine["accelerators"]) or (
            f"{self._machine['cores']} CPU cores and a disk, no GPU"
        )
        self._parts.append(f"<title>{title}</title>")
        self._text((16, 26), title, "text", ' font-size="17" font-weight="600"')
        megabytes = self._section["weight_bytes"] / 1e6
        about = f"{SHOWN}, cut to {megabytes:.0f} MB of weights, which are in a file outside the page cache."
        self._text((16, 47), f"{about} {where}.", "faint")
        how = "Lower and further left is better. Medians; thin lines: fastest to slowest."
        self._text((16, 66), how, "faint")

    def _axes(self) -> None:
        for ms in range(0, self._most_ms + 1, _STEP):
            y = self._at(0, ms / 1e3)[1]
            self._line((_LEFT, y), (_RIGHT, y), "grid")
            self._text((_LEFT - 8, y + 4), str(ms), "faint", ' text-anchor="end"')
        for mb in range(0, self._most_mb + 1, _STEP):
            x = self._at(mb * 1e6, 0)[0]
            self._text((x, _BOTTOM + 18), str(mb), "faint", ' text-anchor="middle"')
        self._text((_LEFT - 8, _TOP - 12), "ms", "faint", ' text-anchor="end"')
        below = "peak RAM above the start of the process, MB"
        self._text((_RIGHT, _BOTTOM + 38), below, "faint", ' text-anchor="end"')

    def _mark(self, point: Point, row: dict[str, Any]) -> None:
        (x, y), colour = point, _COLOURS[row["kind"]]
        low, high = self._point(row, "low"), self._point(row, "high")
        self._line(low, high, colour, ' stroke-opacity="0.4" stroke-width="1.5"')
        self._taken.append((Box(x - 1, high[1], x + 1, low[1]), _SPREAD))
        self._taken.append((Box(x - 8, y - 8, x + 8, y + 8), _MARK))
        if row["kind"] == "ours":
            self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" fill="{self._colours[colour]}"/>')
            return
        peer = row["kind"] == "peer"
        self._parts.append(
            f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" stroke-width="2" '
            f'fill="{self._colours[colour if peer else "page"]}" stroke="{self._colours[colour]}"'
            + (f' transform="rotate(45 {x:.1f} {y:.1f})"/>' if peer else "/>")
        )

    def _label(self, words: str, colour: str, point: Point) -> None:
        """Write a label where least is in its way."""

        def cost(place: tuple[Box, str]) -> float:
            box = place[0]
            outside = (box.right - box.left) * (box.bottom - box.top) - box.overlap(
                Box(_LEFT, _TOP - 20, _WIDTH, _BOTTOM)
            )
            return _MARK * outside + sum(weight * box.overlap(other) for other, weight in self._taken)

        box, anchor = min(_places(words, point), key=cost)
        self._taken.append((box, _MARK))
        x = {"start": box.left, "middle": (box.left + box.right) / 2, "end": box.right}[anchor]
        more = f' text-anchor="{anchor}"' + (' font-weight="600"' if colour == "ours" else "")
        halo = f' stroke="{self._colours["page"]}" stroke-width="4" stroke-linejoin="round"'
        for each in (more + halo, more):
            self._text((x, box.bottom - 4), words, colour, each)

    def _path(self, points: list[Point], colour: str, more: str = "") -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = self._colours[colour]
        self._parts.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"{more}/>')
        self._taken += [(box, _LINE) for box in _along(points)]

    def _line(self, start: Point, end: Point, colour: str, more: str = "") -> None:
        at = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        self._parts.append(f'<line {at} stroke="{self._colours[colour]}"{more}/>')

    def _text(self, at: Point, words: str, colour: str, more: str = "") -> None:
        x, y = at
        colour = self._colours[colour]
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{more}>{escape(words)}</text>')


def _places(words: str, point: Point) -> list[tuple[Box, str]]:
    """Return the boxes where a label may go, the best first, and the anchor of its text in each."""
    width, height, gap = len(words) * _CHARACTER, _FONT + 3, 11
    right, left, middle = point[0] + gap, point[0] - gap - width, point[0] - width / 2
    above, below, level = point[1] - gap - height + 3, point[1] + gap - 3, point[1] - height / 2
    corners = [(right, level, "start"), (left, level, "end")]
    corners += [(middle, top, "middle") for top in (above, below)]
    for top in (above, below):
        corners += [(right - gap, top, "start"), (left + gap, top, "end")]
    return [(Box(x, y, x + width, y + height), anchor) for x, y, anchor in corners]


def _along(points: list[Point]) -> Iterator[Box]:
    """Yield boxes that cover a line."""
    for (x1, y1), (x2, y2) in pairwise(points):
        steps = max(1, math.ceil((x2 - x1) / 6))
        for step in range(steps):
            x, y = x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps
            yield Box(x - 3, y - 3, x + 3, y + 3)
