"""A recording as a picture: lanes, groups and device memory over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, Final

from dynswap_ext._memory import format_bytes
from dynswap_ext._patterns import label_of
from dynswap_ext._recording import CAUSES, Recording, Span
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect.trace import lanes_of, thread_name
from dynswap_ext.inspect.verdict import show_ns

__all__ = ["draw", "write_plot"]

#: Most are Okabe's and Ito's: told apart with every kind of colour vision (there is a test).
_PREFETCHED, _DEMANDED, _COMPUTE = "#56B4E9", "#0072B2", "#009E73"
_WAIT: Final = dict(
    zip(CAUSES, ("#C9C9C9", "#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#000000", "#7A1F4B"), strict=True)
)
_MEMORY: Final = "#8C8C8C"

#: Inches.
_WIDTH: Final = 12.0
_DOTS_PER_INCH: Final = 160
#: More rows than that are not labelled one by one.
_LABELLED: Final = 24
_TICKS: Final = 12
_LABEL_LENGTH: Final = 36
#: So many shapes are pixels in a picture that else has lines (.svg, .pdf): viewers would be slow.
_RASTERED: Final = 3000
#: More rows for a group, and bars in a lane, than that are too thin to be drawn apart.
_ROWS: Final = 100
_BARS: Final = 60
#: More lanes than that would leave no room for anything else.
_COPY_LANES: Final = 4
_THREADS: Final = 6


def write_plot(recording: Recording, path: str | PathLike[str], *, budget: int | None = None) -> None:
    """Draw a recording into a file; see `Handle.plot`."""
    figure = draw(recording, budget=budget)
    try:
        figure.savefig(fspath(path), dpi=_DOTS_PER_INCH)
    except ValueError as error:
        raise ConfigError(
            f"path is {fspath(path)}: {error}; expected an ending such as .png, .svg or .pdf"
        ) from error


def draw(recording: Recording, *, budget: int | None = None) -> Any:
    """Draw a recording.

    Parameters
    ----------
    recording
        What was recorded.
    budget
        Bytes, for a line in the picture of memory.

    Returns
    -------
    matplotlib.figure.Figure
        Of no window: it has axes for lanes, groups and memory.

    Raises
    ------
    ConfigError
        Nothing was used while it was recorded, or matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"plots are drawn by matplotlib, which is not there ({error}); install it with "
            "`pip install dynswap-ext[plot]`"
        ) from error
    if not any(True for _ in recording.of("use")):
        raise ConfigError("nothing to draw: no weight was used while it was recorded")
    return _Picture(recording, budget).on(Figure)


class _Picture:
    def __init__(self, recording: Recording, budget: int | None) -> None:
        self._recording, self._budget = recording, budget
        spans = recording.spans
        self._begin = min(span.begin for span in spans)
        self._copies = list(recording.of("copy"))
        self._waits = list(recording.of("wait"))
        self._compute = list(recording.compute())
        self._end = max(span.end for span in (*spans, *self._compute))
        length = max(1, self._end - self._begin)
        self._threads = list(dict.fromkeys(span.thread for span in recording.of("use", "wait")))
        self._unit, self._scale = next(
            (unit, ns) for unit, ns in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if length >= 2 * ns or ns == 1e3
        )
        #: Bars that are closer than what can be seen are one.
        self._gap = length / 4000
        self._waited: Counter[str] = Counter()
        for span in self._waits:
            self._waited[span.detail] += span.end - span.begin

    def on(self, make: Any) -> Any:
        lanes = self._lanes()
        groups = len(self._recording.groups)
        heights = 0.34 * len(lanes) + 0.25, min(7.0, max(1.8, 0.24 * groups)), 1.5
        figure = make(figsize=(_WIDTH, sum(heights) + 1.5), layout="constrained")
        top, middle, bottom = figure.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": heights, "hspace": 0.03}
        )
        self._draw_lanes(top, lanes)
        self._draw_groups(middle)
        self._draw_memory(bottom)
        for axes in (top, middle, bottom):
            self._dress(axes)
        length = (self._end - self._begin) / self._scale
        bottom.set_xlim(0, length)
        bottom.set_xlabel(f"time since the first use, {self._unit}")
        top.set_title(self._title(), loc="left", fontsize=11)
        figure.align_ylabels([middle, bottom])
        self._legend(figure)
        return figure

    # Lanes --------------------------------------------------------------------------------------------

    def _lanes(self) -> list[tuple[str, list[tuple[str, list[Span]]]]]:
        """From the top: each lane's name, and its spans by colour."""
        lanes = []
        copying = lanes_of(self._copies)
        for number, lane in enumerate(copying if len(copying) <= _COPY_LANES else [self._copies]):
            parts = [
                (_PREFETCHED, [span for span in lane if span.detail != "demanded"]),
                (_DEMANDED, [span for span in lane if span.detail == "demanded"]),
            ]
            lanes.append(("copy" if number == 0 else f"copy {number + 1}", parts))
        threads = self._threads
        for thread in threads[:_THREADS]:
            of = "" if len(threads) == 1 else f" ({_shortened(thread_name(self._recording, thread), 18)})"
            waits = [span for span in self._waits if span.thread == thread]
            compute = [span for span in self._compute if span.thread == thread]
            by_cause = [(colour, [s for s in waits if s.detail == cause]) for cause, colour in _WAIT.items()]
            lanes.append((f"wait{of}", by_cause))
            lanes.append((f"compute{of}", [(_COMPUTE, compute)]))
        return lanes

    def _draw_lanes(self, axes: Any, lanes: Sequence[tuple[str, list[tuple[str, list[Span]]]]]) -> None:
        for row, (_, parts) in enumerate(lanes):
            for colour, spans in parts:
                self._bars(axes, spans, row - 0.38, 0.76, colour)
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])

    # Groups -------------------------------------------------------------------------------------------

    def _draw_groups(self, axes: Any) -> None:
        """A row a group: what its consumers did in the upper half, its copies in the lower."""
        groups = self._recording.groups
        height = max(0.42, 0.5 * len(groups) / _ROWS)
        # What is copied meanwhile is further down: in the lower half, nothing hides it where rows are thin.
        upper, lower = -height, 0.0
        for colour, spans, offset in (
            (_PREFETCHED, [span for span in self._copies if span.detail != "demanded"], lower),
            (_DEMANDED, [span for span in self._copies if span.detail == "demanded"], lower),
            (_COMPUTE, self._compute, upper),
            *(
                (c, [span for span in self._waits if span.detail == cause], upper)
                for cause, c in _WAIT.items()
            ),
        ):
            self._rows(axes, spans, offset, height, colour)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        ticks = _ticks(len(groups))
        labels = [_shortened(_where(groups[i].names), _LABEL_LENGTH) for i in ticks]
        resident = [groups[i].resident for i in ticks]
        axes.set_yticks(ticks, labels, fontsize=8)
        for text, stays in zip(axes.get_yticklabels(), resident, strict=True):
            text.set_fontweight("bold" if stays else "normal")
        streamed = sum(not group.resident for group in groups)
        axes.set_ylabel(f"{len(groups)} groups, {streamed} streamed\n(residents bold)", fontsize=9)

    # Memory -------------------------------------------------------------------------------------------

    def _draw_memory(self, axes: Any) -> None:
        uses = list(self._recording.of("use"))
        budget = self._budget
        most = max([span.bytes for span in uses] + ([budget] if budget else [0]) + [1])
        power = min(4, max(0, most.bit_length() - 1) // 10)
        size, unit = 1024.0**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
        times = [self._at(span.begin) for span in uses] + [self._at(self._end)]
        held = [span.bytes / size for span in uses]
        held += held[-1:] or [0.0]
        axes.fill_between(times, held, step="post", color=_MEMORY, alpha=0.35, linewidth=0)
        axes.step(times, held, where="post", color="#4D4D4D", linewidth=1)
        if budget is not None:
            axes.axhline(budget / size, color="#000000", linestyle=(0, (5, 3)), linewidth=1)
        axes.set_ylim(0, most / size * 1.12)
        axes.set_ylabel(f"weights on\nthe device, {unit}", fontsize=9)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)

    # What is around -----------------------------------------------------------------------------------

    def _dress(self, axes: Any) -> None:
        axes.set_axisbelow(True)
        axes.tick_params(length=2.5)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        passes = [self._at(span.begin) for span in self._recording.of("pass")]
        if len(passes) <= 40:
            for at in passes:
                axes.axvline(at, color="#B0B0B0", linestyle=(0, (1, 2)), linewidth=0.9, zorder=0.5)

    def _title(self) -> str:
        passes = sum(1 for _ in self._recording.of("pass"))
        length = self._end - self._begin
        # Of each consumer's time, in sum.
        computing = sum(span.end - span.begin for span in self._compute)
        waiting = sum(self._waited.values())
        whole = max(1, computing + waiting)
        said = f"{passes} pass{'' if passes == 1 else 'es'} in {show_ns(length)}"
        shares = (
            f"computing {100 * computing / whole:.0f} %, waiting for copies {100 * waiting / whole:.0f} %"
        )
        left_out = len(self._threads) - _THREADS
        hidden = f"; {left_out} more threads are not in the lanes" if left_out > 0 else ""
        dropped = f"; {self._recording.dropped} spans did not fit" if self._recording.dropped else ""
        return f"{said}: {shares}{hidden}{dropped}"

    def _legend(self, figure: Any) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        entries: list[Any] = []
        for what, colour in (("prefetched", _PREFETCHED), ("demanded", _DEMANDED)):
            copies = [span for span in self._copies if span.detail == what]
            if copies:
                size = format_bytes(sum(span.bytes for span in copies))
                entries.append(Patch(color=colour, label=f"copy, {what}: {size}"))
        computing = show_ns(sum(span.end - span.begin for span in self._compute))
        entries.append(Patch(color=_COMPUTE, label=f"compute: {computing}"))
        for cause, colour in _WAIT.items():
            if self._waited[cause]:
                label = f"wait, {cause}: {show_ns(self._waited[cause])}"
                entries.append(Patch(color=colour, label=label))
        entries.append(
            Patch(facecolor=_MEMORY, alpha=0.35, edgecolor="#4D4D4D", label="weights on the device")
        )
        if self._budget is not None:
            label = f"budget: {format_bytes(self._budget)}"
            entries.append(Line2D([], [], color="#000000", linestyle=(0, (5, 3)), linewidth=1, label=label))
        if any(True for _ in self._recording.of("pass")):
            entries.append(
                Line2D([], [], color="#B0B0B0", linestyle=(0, (1, 2)), linewidth=1.2, label="a pass begins")
            )
        figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)

    # Bars ---------------------------------------------------------------------------------------------

    def _at(self, ns: int) -> float:
        return (ns - self._begin) / self._scale

    def _bars(self, axes: Any, spans: Sequence[Span], low: float, height: float, colour: str) -> None:
        """Bars of one lane: few with an edge between them, of many those as one that cannot be told apart."""
        apart = len(spans) <= _BARS and colour not in _WAIT.values()  # those may be short, and are to be seen
        merged: list[tuple[int, int]] = []
        for span in spans:
            if merged and not apart and span.begin - merged[-1][1] < self._gap:
                merged[-1] = merged[-1][0], max(merged[-1][1], span.end)
            else:
                merged.append((span.begin, span.end))
        if not merged:
            return
        bars = [(self._at(begin), (end - begin) / self._scale) for begin, end in merged]
        axes.broken_barh(
            bars,
            (low, height),
            facecolor=colour,
            edgecolor="white" if apart else colour,
            linewidth=0.4 if apart else 0.7 if colour in _WAIT.values() else 0.3,
            rasterized=len(bars) > _RASTERED,
        )

    def _rows(self, axes: Any, spans: Sequence[Span], offset: float, height: float, colour: str) -> None:
        """Bars, each in its group's row."""
        if not spans:
            return
        from matplotlib.collections import PolyCollection

        least = int(7 * self._gap)  # to be seen at all
        corners = []
        for span in spans:
            left, right = self._at(span.begin), self._at(max(span.end, span.begin + least))
            low = span.group + offset
            corners.append([(left, low), (left, low + height), (right, low + height), (right, low)])
        axes.add_collection(
            PolyCollection(corners, facecolor=colour, linewidth=0, rasterized=len(spans) > _RASTERED)
        )


def _ticks(count: int) -> list[int]:
    """Rows to label: all, or some at even distances, the first and the last among them."""
    if count <= _LABELLED:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_TICKS - 1)) for i in range(_TICKS)})


def _where(names: Sequence[str]) -> str:
    """A group's name: its weight's, or that of the module, or modules, that its weights are in."""
    if len(names) == 1:
        return names[0]
    first, last = (name.split(".")[:-1] for name in (names[0], names[-1]))
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    if any(word.isdecimal() for word in first[:shared]) or (shared and first == last):
        return ".".join(first[:shared])
    if not first or not last:
        return label_of(names, 2)
    return f"{'.'.join(first)} to {'.'.join(last)}"


def _shortened(text: str, most: int) -> str:
    """Without words from the middle, such as ``model.layers.0 … down_proj.weight``; else without letters."""
    if len(text) <= most:
        return text
    words = text.split(".")
    numbered = next((i for i, word in enumerate(words) if word.isdecimal()), 0)
    head = ".".join(words[: numbered + 1])
    for kept in range(len(words) - numbered - 2, 0, -1):
        shorter = f"{head} … {'.'.join(words[-kept:])}"
        if len(shorter) <= most:
            return shorter
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"
