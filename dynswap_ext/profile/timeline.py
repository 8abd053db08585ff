"""Draws a recording as a picture: lanes, groups and device memory over time."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Final

from dynswap_ext._util import pictures
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.name_patterns import common_words, label_of
from dynswap_ext._util.pictures import BLACK, BLUE, DASHED, GREEN, ORANGE, PINK, RED
from dynswap_ext._util.tables import shortened
from dynswap_ext._util.units import show_ns
from dynswap_ext.errors import ConfigError
from dynswap_ext.profile.recording import CAUSES, COPIES, SAVED_TENSORS, Recording, Span

#: Colours of copies and compute, and of waits by cause. Any two that touch can be told apart with every kind
#: of colour vision (there is a test).
_PREFETCHED, _DEMANDED, _OUT, _COMPUTE = "#56B4E9", BLUE, "#5533CC", GREEN
_WAIT: Final = dict(zip(CAUSES, ("#C9C9C9", RED, ORANGE, PINK, "#F0E442", BLACK, "#7A1F4B"), strict=True))
_MEMORY: Final = "#8C8C8C"
_PASS: Final[dict[str, Any]] = {"color": "#B0B0B0", "linestyle": (0, (1, 2)), "linewidth": 0.9}
_BUDGET: Final[dict[str, Any]] = {"color": BLACK, "linestyle": DASHED, "linewidth": 1}

#: Width of the picture, in inches.
_WIDTH: Final = 12.0
#: The most rows of groups that all have a label; of more rows, `_TICKS` have one.
_LABELLED: Final = 24
_TICKS: Final = 12
#: The most characters of a label.
_LABEL_LENGTH: Final = 36
#: More shapes than this are rasterised in vector formats (.svg, .pdf), because viewers would be slow.
_RASTERED: Final = 3000
#: More rows of groups than this are too thin for gaps between them.
_ROWS: Final = 100
#: More bars of one colour than this are too thin for edges.
_BARS: Final = 60
#: The most lanes of copies, and the most threads with lanes; more would leave no room for the rest.
_COPY_LANES: Final = 4
_THREADS: Final = 6
#: More marks of passes than this would hide what they mark.
_PASSES: Final = 40


def write_plot(recording: Recording, path: str | PathLike[str], *, budget: int | None = None) -> None:
    """Draw a recording into a file, with a line at the budget in bytes, as `Handle.plot` does."""
    pictures.save(draw(recording, budget=budget), path, dots_per_inch=160)


def draw(recording: Recording, *, budget: int | None = None) -> Any:
    """Return the picture of a recording, with a line at the budget in bytes, as an object of matplotlib."""
    if not any(True for _ in recording.of("use", *COPIES)):
        raise ConfigError(
            "nothing to draw: no weight was used while it was recorded, except those that need no move"
        )
    return _Picture(recording, budget).draw()


class _Picture:
    def __init__(self, recording: Recording, budget: int | None) -> None:
        self._recording, self._budget = recording, budget
        self._compute = list(recording.compute())
        self._passes = list(recording.of("pass"))
        self._begin = min(span.begin for span in recording.spans)
        self._end = max(span.end for span in (*recording.spans, *self._compute))
        length = max(1, self._end - self._begin)
        self._unit, self._scale = next(
            (unit, ns) for unit, ns in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if length >= 2 * ns or ns == 1e3
        )
        self._shortest = length * 7 // 4000
        lanes = recording.lanes()
        threads = [lane for lane in lanes if lane.thread]
        self._left_out = max(0, len(threads) // 2 - _THREADS)
        self._lanes = [(lane.kind, lane.spans) for lane in lanes if not lane.thread]
        if len(self._lanes) > _COPY_LANES:
            self._lanes = [(kind, list(recording.of(kind))) for kind in COPIES if any(recording.of(kind))]
        for lane in threads[: 2 * _THREADS]:
            of = f" ({shortened(lane.thread, 18)})" if len(threads) > 2 else ""
            self._lanes.append((f"{lane.kind}{of}", lane.spans))

    def draw(self) -> Any:
        groups = len(self._recording.groups)
        heights = 0.34 * len(self._lanes) + 0.25, min(7.0, max(1.8, 0.24 * groups)), 1.5
        drawn = pictures.new_picture(_WIDTH, sum(heights) + 1.5)
        axes = drawn.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights, "hspace": 0.03})
        lanes, middle, bottom = axes
        for each in axes:
            pictures.style(each, grid="y" if each is bottom else "")
            each.tick_params(length=2.5)
            for mark in self._passes if len(self._passes) <= _PASSES else ():
                each.axvline(self._at(mark.begin), zorder=0.5, **_PASS)
        bars = [(span, row - 0.38) for row, (_, spans) in enumerate(self._lanes) for span in spans]
        self._draw_bars(lanes, bars, 0.76)
        lanes.set_ylim(len(self._lanes) - 0.4, -0.6)
        lanes.set_yticks(range(len(self._lanes)), [name for name, _ in self._lanes])
        lanes.set_title(self._title(), loc="left", fontsize=11)
        self._draw_groups(middle)
        self._draw_memory(bottom)
        bottom.set_xlim(0, self._at(self._end))
        bottom.set_xlabel(f"time since the first use, {self._unit}")
        drawn.align_ylabels([middle, bottom])
        drawn.legend(handles=self._legend(), loc="outside right upper", frameon=False, fontsize=8)
        return drawn

    def _draw_bars(self, axes: Any, bars: Iterable[tuple[Span, float]], height: float) -> None:
        """Draw a bar for each span, at the given height of its lower edge, and wide enough to be seen."""
        from matplotlib.collections import PolyCollection

        corners: defaultdict[str, list[Any]] = defaultdict(list)
        for span, low in bars:
            left, right = self._at(span.begin), self._at(max(span.end, span.begin + self._shortest))
            high = low + height
            corners[_colour(span)].append([(left, low), (left, high), (right, high), (right, low)])
        for colour, shapes in corners.items():
            apart = len(shapes) <= _BARS and colour not in _WAIT.values()
            axes.add_collection(
                PolyCollection(
                    shapes,
                    facecolor=colour,
                    edgecolor="white",
                    linewidth=0.4 if apart else 0,
                    rasterized=len(shapes) > _RASTERED,
                )
            )

    def _draw_groups(self, axes: Any) -> None:
        """Draw a row for each group: compute and waits in its upper half, copies in its lower half."""
        groups = self._recording.groups
        height = max(0.42, 0.5 * len(groups) / _ROWS)
        # Copies are drawn first, because where rows are thin they would hide the rest.
        copies = [(span, float(span.group)) for span in self._recording.of(*COPIES)]
        uses = [(span, span.group - height) for span in (*self._compute, *self._recording.of("wait"))]
        self._draw_bars(axes, [*copies, *uses], height)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        ticks = _ticks(len(groups))
        labels = [shortened(_where(groups[i].names), _LABEL_LENGTH) for i in ticks]
        axes.set_yticks(ticks, labels, fontsize=8)
        for i, text in zip(ticks, axes.get_yticklabels(), strict=True):
            text.set_fontweight("bold" if groups[i].resident else "normal")
        streamed = sum(not group.resident for group in groups)
        axes.set_ylabel(f"{len(groups)} groups, {streamed} streamed\n(residents bold)", fontsize=9)

    def _draw_memory(self, axes: Any) -> None:
        uses = list(self._recording.of("use"))
        if not uses:
            return
        most = max(1, self._budget or 0, *(span.bytes + span.saved_bytes for span in uses))
        size, unit = pictures.byte_scale(most)
        times = [*(self._at(span.begin) for span in uses), self._at(self._end)]
        held = [span.bytes / size for span in (*uses, uses[-1])]
        axes.fill_between(times, held, step="post", color=_MEMORY, alpha=0.35, linewidth=0)
        axes.step(times, held, where="post", color="#4D4D4D", linewidth=1)
        if any(span.saved_bytes for span in uses):
            both = [(span.bytes + span.saved_bytes) / size for span in (*uses, uses[-1])]
            axes.fill_between(times, held, both, step="post", color=_OUT, alpha=0.35, linewidth=0)
        if self._budget is not None:
            axes.axhline(self._budget / size, **_BUDGET)
        axes.set_ylim(0, most / size * 1.12)
        axes.set_ylabel(f"on the\ndevice, {unit}", fontsize=9)

    def _title(self) -> str:
        passes = len(self._passes)
        # Shares of the time of the threads that use weights, summed over all of them.
        computing, waiting = _length(self._compute), _length(self._recording.of("wait"))
        whole = max(1, computing + waiting)
        text = (
            f"{passes} pass{'' if passes == 1 else 'es'} in {show_ns(self._end - self._begin)}: computing "
            f"{100 * computing / whole:.0f} %, waiting for copies {100 * waiting / whole:.0f} %"
        )
        if self._left_out:
            text += f"; {self._left_out} more threads are not in the lanes"
        return text + (f"; {self._recording.dropped} spans did not fit" if self._recording.dropped else "")

    def _legend(self) -> list[Any]:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        entries: list[Any] = []
        copied: Counter[str] = Counter()
        for span in self._recording.of("copy"):
            copied[span.detail] += span.bytes
        for what, when, colour in (
            ("prefetched", "ahead of use", _PREFETCHED),
            ("demanded", "only when needed", _DEMANDED),
        ):
            if copied[what]:
                label = f"copy, {what}: {format_bytes(copied[what])}\n{when}"
                entries.append(Patch(color=colour, label=label))
        left = sum(span.bytes for span in self._recording.of("copy out"))
        if left:
            label = f"copy out: {format_bytes(left)}\n{SAVED_TENSORS}"
            entries.append(Patch(color=_OUT, label=label))
        entries.append(Patch(color=_COMPUTE, label=f"compute: {show_ns(_length(self._compute))}"))
        for cause, colour in _WAIT.items():
            waited = _length(span for span in self._recording.of("wait") if span.detail == cause)
            if waited:
                label = f"wait, {cause}: {show_ns(waited)}\n" + textwrap.fill(f"for {CAUSES[cause]}", 30)
                entries.append(Patch(color=colour, label=label))
        memory: dict[str, Any] = {"facecolor": _MEMORY, "alpha": 0.35, "edgecolor": "#4D4D4D"}
        entries.append(Patch(label="weights on the device", **memory))
        if any(span.saved_bytes for span in self._recording.of("use")):
            entries.append(Patch(color=_OUT, alpha=0.35, label=f"{SAVED_TENSORS},\non the device"))
        if self._budget is not None:
            entries.append(Line2D([], [], label=f"budget: {format_bytes(self._budget)}", **_BUDGET))
        if self._passes:
            entries.append(Line2D([], [], label="a pass begins", **_PASS))
        return entries

    def _at(self, ns: int) -> float:
        return (ns - self._begin) / self._scale


def _colour(span: Span) -> str:
    if span.kind == "copy":
        return _DEMANDED if span.detail == "demanded" else _PREFETCHED
    if span.kind == "copy out":
        return _OUT
    return _WAIT[span.detail] if span.kind == "wait" else _COMPUTE


def _length(spans: Iterable[Span]) -> int:
    return sum(span.end - span.begin for span in spans)


def _ticks(count: int) -> list[int]:
    """Return the rows that have a label: all, or some at even distances, including the first and the last."""
    if count <= _LABELLED:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_TICKS - 1)) for i in range(_TICKS)})


def _where(names: Sequence[str]) -> str:
    """Return a name for a group of weights: its only weight, or the module or modules that they are in."""
    if len(names) == 1:
        return names[0]
    first, last = (name.split(".")[:-1] for name in (names[0], names[-1]))
    shared = common_words([first, last])
    if any(map(str.isdecimal, shared)) or (shared and first == last):
        return ".".join(shared)
    if not first or not last:
        return label_of(names)
    return f"{'.'.join(first)} to {'.'.join(last)}"
