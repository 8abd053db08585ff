"""A picture of a plan: time of a pass and stalls, over the budget."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.pictures import (
    BLACK,
    BLUE,
    DASHED,
    GREEN,
    PINK,
    RED,
    byte_scale,
    new_picture,
    save,
    style,
)
from dynswap_ext._util.tables import shortened
from dynswap_ext._util.units import show_seconds
from dynswap_ext.planning.predict import Plan


def plot(plan: Plan, path: str | PathLike[str], *, title: str = "", points: int = 60) -> Path:
    """Draw the time of a pass over the budget and, below that, the stalls of a pass.

    The upper part also shows the limit of any order of copies, and the time with all weights on the device.
    All axes are linear and begin at zero. The two parts have different scales.

    Parameters
    ----------
    plan
        The plan. The budgets that it was asked for are marked.
    path
        The file. Its suffix chooses the format (.png, .svg, .pdf).
    title
        The title of the picture.
    points
        About how many budgets are predicted for the lines.

    Raises
    ------
    ConfigError
        matplotlib is not installed, or cannot write such a file.
    """
    return save(draw(plan, title=title, points=points), path)


def draw(plan: Plan, *, title: str = "", points: int = 60) -> Any:
    """Return the picture of `plot` as an object of matplotlib."""
    drawn = new_picture(9, 6)
    from matplotlib.ticker import EngFormatter

    upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curve = plan.curve(points)
    size, size_name = byte_scale(plan.all)
    budgets = [prediction.budget / size for prediction in curve]
    stalls = [prediction.stall_seconds for prediction in curve]
    limits = [prediction.limit_seconds for prediction in curve]
    seconds = [prediction.seconds for prediction in curve]
    # The lines are steps, because weights that stay on the device are added a group at a time.
    upper.step(budgets, seconds, where="post", color=BLUE, linewidth=2.2, label="time of a pass")
    upper.plot(budgets, limits, color=BLACK, linestyle=DASHED, label="limit of any order of copies")
    upper.axhline(curve[-1].compute_seconds, color=GREEN, linestyle=":", label="all resident")
    lower.fill_between(budgets, stalls, step="post", color=RED, alpha=0.25, linewidth=0)
    lower.step(budgets, stalls, where="post", color=RED, linewidth=1.8)
    for prediction in plan.predictions:
        if prediction.budget in plan.asked:  # named in the legend, where labels cannot overlap
            at = prediction.budget / size
            label = f"{format_bytes(prediction.budget)}: {show_seconds(prediction.seconds)}"
            upper.plot(at, prediction.seconds, "o", color=PINK, markersize=8, label=label, zorder=3)
            lower.plot(at, prediction.stall_seconds, "o", color=PINK, markersize=7, zorder=3)
    for axes in (upper, lower):
        style(axes, grid="both")
        if plan.smallest < plan.hidden_from < plan.all:
            hidden = f"copies hidden from {format_bytes(plan.hidden_from)}"
            axes.axvline(plan.hidden_from / size, color="#999999", linestyle="-.", label=hidden)
        too_small = f"too small: under {format_bytes(plan.smallest)}"
        axes.axvspan(0, plan.smallest / size, color="#999999", alpha=0.25, linewidth=0, label=too_small)
        axes.yaxis.set_major_formatter(EngFormatter(unit="s"))
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, 1.02 * budgets[-1])
    if not any(stalls):
        lower.set_ylim(top=curve[-1].seconds or 1)
    upper.set_ylabel("time of a pass")
    lower.set_ylabel("stalls a pass")
    lower.set_xlabel(f"budget: device memory for weights, {size_name}")
    handles, labels = upper.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    if title:
        drawn.suptitle(shortened(title, 100), fontsize=10)
    return drawn
