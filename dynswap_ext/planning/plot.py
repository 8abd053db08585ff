"""A picture of a plan: time of a pass and stalls, over the budget."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

from dynswap_ext._memory import format_bytes
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.predict import Plan, Prediction

__all__ = ["plot"]

#: Okabe and Ito's, which people with any colour vision tell apart; lines differ in dashes too.
_TIME: Final = "#0072B2"
_LIMIT: Final = "#000000"
_RESIDENT: Final = "#009E73"
_STALL: Final = "#D55E00"
_ASKED: Final = "#CC79A7"


def plot(plan: Plan, path: str | PathLike[str], *, title: str = "", points: int = 60) -> Path:
    """Write a picture: above, time of a pass, its limit and the time all resident; below, stalls.

    Parameters
    ----------
    plan
        Budgets that it was asked for are marked.
    path
        Where to; the suffix chooses the format (.png, .svg, .pdf).
    title
        Over the picture.
    points
        Budgets that are predicted for the lines.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or cannot write such a file.
    """
    where, figure = can_plot(path)
    draw(plan, title=title, points=points, figure=figure)
    try:
        figure.savefig(where)
    except OSError as error:
        raise ConfigError(f"{where} cannot be written: {error.strerror}; choose another path") from error
    return where


def draw(plan: Plan, *, title: str = "", points: int = 60, figure: Any = None) -> Any:
    """The picture of `plot` as a matplotlib figure: on `figure`, which is empty, or on a new one."""
    figure = _empty() if figure is None else figure
    curve = plan.curve(points)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw(upper, lower, plan, curve)
    if title:
        figure.suptitle(title if len(title) <= 100 else f"…{title[-99:]}", fontsize=10)
    return figure


def _empty() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"pictures need matplotlib ({error}); install it with `pip install dynswap-ext[plot]`"
        ) from error
    return Figure(figsize=(9, 6), dpi=120, layout="constrained")


def can_plot(path: str | PathLike[str]) -> tuple[Path, Any]:
    """The path and an empty picture, if there can be one there.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or cannot write such a file, or there is no such folder.
    """
    where = Path(path)
    figure = _empty()
    if where.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"{where} does not end in a format of pictures; expected .png, .svg or .pdf")
    if not where.parent.is_dir():
        raise ConfigError(f"there is no folder {where.parent} for the picture {where.name}; make it first")
    return where, figure


def _draw(upper: Any, lower: Any, plan: Plan, curve: Sequence[Prediction]) -> None:
    bytes_unit, byte_name = _unit_of_bytes(plan.all)
    longest = max(prediction.seconds for prediction in curve)
    time_unit, time_name = (1.0, "s") if longest >= 1 else (1e-3, "ms") if longest >= 1e-3 else (1e-6, "µs")
    x = [prediction.budget / bytes_unit for prediction in curve]

    def seconds(name: str) -> list[float]:
        return [getattr(prediction, name) / time_unit for prediction in curve]

    upper.plot(x, seconds("seconds"), color=_TIME, linewidth=2.2, label="time of a pass", zorder=3)
    upper.plot(
        x,
        seconds("limit_seconds"),
        color=_LIMIT,
        linewidth=1.2,
        linestyle=(0, (5, 3)),
        label="limit: max(compute, copies)",
        zorder=4,
    )
    upper.axhline(
        curve[-1].compute_seconds / time_unit,
        color=_RESIDENT,
        linewidth=1.4,
        linestyle=":",
        label="all resident",
    )
    lower.fill_between(x, seconds("stall_seconds"), color=_STALL, alpha=0.25, linewidth=0)
    lower.plot(x, seconds("stall_seconds"), color=_STALL, linewidth=1.8)
    if plan.smallest < plan.hidden_from < plan.all:
        for axes in (upper, lower):
            axes.axvline(plan.hidden_from / bytes_unit, color="#999999", linewidth=1, linestyle="-.")
        lower.annotate(
            f"copies hidden from {format_bytes(plan.hidden_from)}",
            (plan.hidden_from / bytes_unit, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if plan.hidden_from > plan.all / 2 else 5, -5),
            textcoords="offset points",
            ha="right" if plan.hidden_from > plan.all / 2 else "left",
            va="top",
            fontsize=9,
            bbox=_PAPER,
        )
    upper.set_ylabel(f"time of a pass, {time_name}")
    lower.set_ylabel(f"stalls a pass, {time_name}")
    lower.set_xlabel(f"budget, {byte_name}")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, 1.02 * x[-1])
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    upper.set_ylim(top=(1.12 + 0.05 * min(6, len(plan.asked))) * longest / time_unit or 1)
    if not any(prediction.stall_seconds > 0 for prediction in curve):
        lower.set_ylim(top=1)
    _mark_asked(upper, lower, plan, bytes_unit, time_unit)
    # Beside the lines, never on them.
    upper.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=9, frameon=False)


#: The size of a letter and of a line of a label, in parts of the upper axes.
_LETTER: Final = 0.0086
_LINE: Final = 0.055
#: Labels of dots further to the right than this end at their dot.
_TURN: Final = 0.75
_LEADER: Final = {"arrowstyle": "-", "color": _ASKED, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
#: Behind labels, so that lines do not run through them.
_PAPER: Final = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def _mark_asked(upper: Any, lower: Any, plan: Plan, bytes_unit: float, time_unit: float) -> None:
    """A dot for each budget that was asked for, with a label where there is room for one."""
    found = {prediction.budget: prediction for prediction in plan.predictions}
    right, top = upper.get_xlim()[1], upper.get_ylim()[1]
    # Left end, right end and foot of what no label may cover, in parts of the axes: dots, then labels.
    taken = [
        (x - 0.006, x + 0.006, found[budget].seconds / time_unit / top - _LINE / 2)
        for budget in plan.asked
        for x in [budget / bytes_unit / right]
    ]
    # Outer ones last: a line from a dot straight up to its label then meets no other label.
    leftward = [budget for budget in plan.asked if budget / bytes_unit >= _TURN * right]
    rightward = [budget for budget in plan.asked if budget not in leftward]
    for number, budget in enumerate([*reversed(rightward), *leftward]):
        prediction = found[budget]
        place, height = budget / bytes_unit, prediction.seconds / time_unit
        label = "asked for" if number == 0 else None
        upper.plot([place], [height], "o", color=_ASKED, markersize=8, zorder=5, label=label)
        lower.plot([place], [prediction.stall_seconds / time_unit], "o", color=_ASKED, markersize=7, zorder=5)
        text = f"{format_bytes(budget)}: {_time(prediction.seconds)}"
        wide, x, foot = _LETTER * len(text), place / right, height / top + _LINE / 2
        left = x + 0.008 if x < _TURN else x - 0.008 - wide
        # Above the dot, and above the labels that are there already.
        while any(
            left < end and begin < left + wide and abs(foot - other) < _LINE for begin, end, other in taken
        ):
            foot += _LINE / 2
        if foot > 1 - _LINE:
            continue
        taken.append((left, left + wide, foot))
        upper.annotate(
            text,
            (place, height),
            xytext=(left, foot),
            textcoords="axes fraction",
            va="bottom",
            fontsize=9,
            zorder=6,
            bbox=_PAPER,
            arrowprops={**_LEADER, "relpos": (0 if x < _TURN else 1, 0)},
        )


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _unit_of_bytes(amount: int) -> tuple[float, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if amount >= 1024**power:
            return float(1024**power), name
    return 1.0, "bytes"
