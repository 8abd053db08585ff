"""Gradients as a picture, from one parameter to thousands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any, Final

from dynswap_ext._util.figure import BLACK, BLUE, GREY, ORANGE, RED, figure, save, style
from dynswap_ext.inspect._gradient_figures import Gradient

__all__ = ["draw"]

#: Names below the axis; more are thinned out.
_NAMES: Final = 60
#: Characters of a name; a longer one loses its middle.
_LETTERS: Final = 40


def draw(gradients: Sequence[Gradient], path: str | PathLike[str], title: str) -> None:
    """Draw mean and maximum of each gradient, and mark what has neither."""
    count = len(gradients)
    names = [_shortened(gradient.name) for gradient in gradients]
    width = min(20.0, max(6.0, 2.5 + 0.24 * min(count, _NAMES)))
    drawn = figure(width, 4.5 + 0.07 * max(map(len, names)))  # as much below the axes as the names take
    axes = drawn.subplots()
    style(axes)
    # The maximum broader and below, so that it shows where both are the same.
    maxima, means = [_on_scale(g.max) for g in gradients], [_on_scale(g.mean) for g in gradients]
    dot = 7.0 if count <= _NAMES else 4.0
    axes.plot(maxima, "o-", color=ORANGE, label="maximum", linewidth=2.6, markersize=dot)
    axes.plot(means, "o-", color=BLUE, label="mean", linewidth=1.2, markersize=dot / 2)
    axes.set_yscale("log")
    if all(map(math.isnan, (*maxima, *means))):
        axes.set_ylim(1e-8, 1.0)  # nothing else says what to show
    axes.margins(y=0.1)  # room for the marks
    axes.set_xlim(-0.5, count - 0.5)
    _mark(axes, [i for i, g in enumerate(gradients) if g.missing], "no gradient", "x", GREY, at=0.02)
    _mark(axes, [i for i, g in enumerate(gradients) if g.max == 0], "all zero", "v", BLACK, at=0.05)
    _mark(axes, [i for i, g in enumerate(gradients) if g.nan or g.inf], "NaN or infinite", "X", RED, at=0.98)
    step = -(-count // _NAMES)
    shown = range(0, count, step)
    axes.set_xticks(list(shown), [names[i] for i in shown], rotation=90, fontsize=7)
    each = f", 1 of {step} named" if step > 1 else ""
    axes.set_xlabel(f"{count} parameters in the order of the layers{each}")
    axes.set_ylabel("absolute value of the gradient")
    axes.set_title(title)
    # Outside the axes, where no curve is.
    drawn.legend(loc="outside upper right", ncols=5, frameon=False, fontsize=9)
    save(drawn, path)


def _on_scale(value: float | None) -> float:
    """Return a value that a logarithmic axis has a place for, else a gap."""
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan


def _mark(axes: Any, where: list[int], label: str, marker: str, colour: str, *, at: float) -> None:
    """Draw marks at a height of the axes, whatever their scale."""
    if where:
        place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(where, [at] * len(where), marker, color=colour, markersize=6, label=label, **place)


def _shortened(name: str) -> str:
    if len(name) <= _LETTERS:
        return name
    half = (_LETTERS - 1) // 2
    return f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
