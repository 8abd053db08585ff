"""Gradients as a picture, from one parameter to thousands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from dynswap_ext.inspect._figure import figure, save

if TYPE_CHECKING:
    from dynswap_ext.inspect.gradients import Gradient

__all__ = ["draw"]

# Okabe and Ito's, which are told apart with any colour vision.
_BLUE: Final = "#0072B2"
_ORANGE: Final = "#E69F00"
_RED: Final = "#D55E00"
_GREY: Final = "#767676"
#: Names below the axis; more are thinned out.
_NAMES: Final = 60
#: Characters of a name; a longer one loses its middle.
_LETTERS: Final = 40


def draw(gradients: Sequence[Gradient], path: str | PathLike[str], title: str) -> None:
    """Draw mean and maximum of each gradient, and mark what has neither."""
    count = len(gradients)
    names = [_shortened(gradient.name) for gradient in gradients]
    width = min(20.0, max(6.0, 2.5 + 0.24 * min(count, _NAMES)))
    drawn = figure(width, 4.5 + 0.07 * max(map(len, names)))  # as much beneath the axes as the names take
    axes = drawn.subplots()
    few = count <= _NAMES
    # The maximum broader and below, so that it shows where both are the same.
    _curve(axes, [g.max for g in gradients], "maximum", _ORANGE, line=2.6, dot=7.0 if few else 4.0)
    _curve(axes, [g.mean for g in gradients], "mean", _BLUE, line=1.2, dot=4.0 if few else 1.8)
    axes.set_yscale("log")
    if not any(_positive(value) for g in gradients for value in (g.mean, g.max)):
        axes.set_ylim(1e-8, 1.0)  # nothing else says what to show
    axes.margins(y=0.1)  # room for the marks
    axes.set_xlim(-0.5, count - 0.5)
    _mark(axes, [i for i, g in enumerate(gradients) if g.missing], "no gradient", "x", _GREY, at=0.02)
    _mark(axes, [i for i, g in enumerate(gradients) if g.max == 0], "all zero", "v", "black", at=0.05)
    _mark(axes, [i for i, g in enumerate(gradients) if g.nan or g.inf], "NaN or infinite", "X", _RED, at=0.98)
    _name(axes, names)
    axes.set_ylabel("absolute value of the gradient")
    axes.set_title(title)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    # Beside the axes, where no curve is.
    drawn.legend(loc="outside upper right", ncols=5, frameon=False, fontsize=9)
    save(drawn, path)


def _curve(
    axes: Any, values: list[float | None], label: str, colour: str, *, line: float, dot: float
) -> None:
    heights = [_on_scale(value) for value in values]
    axes.plot(heights, color=colour, label=label, linewidth=line, marker="o", markersize=dot)


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _on_scale(value: float | None) -> float:
    """A value that a logarithmic axis has a place for, else a gap."""
    return value if value is not None and _positive(value) else math.nan


def _mark(axes: Any, where: list[int], label: str, marker: str, colour: str, *, at: float) -> None:
    """Marks at a height of the axes, whatever their scale."""
    if where:
        axes.plot(
            where,
            [at] * len(where),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker=marker,
            color=colour,
            markersize=6,
            label=label,
            clip_on=False,
        )


def _name(axes: Any, names: Sequence[str]) -> None:
    step = -(-len(names) // _NAMES) or 1
    shown = range(0, len(names), step)
    axes.set_xticks(list(shown), [names[i] for i in shown], rotation=90, fontsize=7)
    each = f", every {_ordinal(step)} named" if step > 1 else ""
    axes.set_xlabel(f"{len(names)} parameters in the order of the layers{each}")


def _ordinal(number: int) -> str:
    special = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else special.get(number % 10, 'th')}"


def _shortened(name: str) -> str:
    if len(name) <= _LETTERS:
        return name
    half = (_LETTERS - 1) // 2
    return f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
