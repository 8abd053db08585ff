"""Gradients after a backward pass: how they flow through the layers, and which are unhealthy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext._util.listing import listed
from dynswap_ext._util.pictures import BLACK, BLUE, GREY, ORANGE, RED, new_picture, save, style
from dynswap_ext._util.tables import Printable, facts_grid, plain_table, shape_text, shortened
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._model import root_of

#: The most elements that are measured in one piece, as float64.
_PIECE: Final = 1 << 22
#: The most names below the axis; of more parameters, only some are named.
_NAMES: Final = 60
#: The most characters of a name; a longer one loses its middle.
_LETTERS: Final = 40


@dataclass(frozen=True)
class Gradient:
    """Figures of the gradient of one parameter, by the absolute values of its elements."""

    #: The name of the parameter.
    name: str
    #: The shape of the parameter.
    shape: tuple[int, ...]
    #: The dtype of the gradient; None if there is none.
    dtype: torch.dtype | None = None
    #: The mean over all elements, including those that a sparse gradient does not store. NaN or infinite if
    #: an element is; None without a gradient.
    mean: float | None = None
    #: The maximum. NaN or infinite if an element is; None without a gradient.
    max: float | None = None
    #: The Euclidean norm. NaN or infinite if an element is; None without a gradient.
    norm: float | None = None
    #: The number of elements that are NaN.
    nan: int = 0
    #: The number of elements that are infinite.
    inf: int = 0

    @property
    def missing(self) -> bool:
        """Whether the parameter has no gradient."""
        return self.dtype is None


@dataclass(frozen=True, repr=False)
class GradientFlow(Printable):
    """The result of `gradient_flow`. ``print`` shows a table, rich a coloured one."""

    #: The gradients of the parameters that require one, each once, in the order of the layers.
    gradients: tuple[Gradient, ...]

    def plot(self, path: str | PathLike[str], *, title: str = "Gradient flow") -> None:
        """Draw the mean and maximum of each parameter's gradient, on a logarithmic scale.

        Parameters
        ----------
        path : path-like
            The file, which is overwritten if it exists. Its suffix chooses the format (.png, .svg, .pdf).
        title : str
            The title of the picture.

        Raises
        ------
        ConfigError
            matplotlib is not installed (``pip install dynswap-ext[plot]``), or does not support the format.
        """
        _draw(self.gradients, path, title)

    def __repr__(self) -> str:
        return f"<GradientFlow of {len(self.gradients)} parameters>"

    def _parts(self) -> tuple[Any, ...]:
        rows = [[g.name, shape_text(g.shape), _figure(g.mean), _figure(g.max)] for g in self.gradients]
        return (plain_table(["parameter", "shape", "mean", "max"], rows, right=("mean", "max")),)


@dataclass(frozen=True, repr=False)
class GradientHealth(Printable):
    """The result of `gradient_health`. ``print`` shows a table, rich a coloured one."""

    #: The gradients of the parameters that require one, each once, in the order of the layers.
    gradients: tuple[Gradient, ...]
    #: The norm below which a gradient is found vanishing.
    vanishing_below: float
    #: The norm above which a gradient is found exploding.
    exploding_above: float
    #: Names of the parameters that have no gradient.
    missing: tuple[str, ...]
    #: Names of the parameters whose gradients have NaN elements.
    nan: tuple[str, ...]
    #: Names of the parameters whose gradients have infinite elements.
    inf: tuple[str, ...]
    #: Names of the parameters whose gradients have a norm below `vanishing_below`.
    vanishing: tuple[str, ...]
    #: Names of the parameters whose gradients have a finite norm above `exploding_above`.
    exploding: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether no gradient is missing, NaN, infinite, vanishing or exploding."""
        return not self._findings()

    @property
    def total_norm(self) -> float:
        """The Euclidean norm of all gradients together, like that of `torch.nn.utils.clip_grad_norm_`."""
        return math.hypot(*(g.norm for g in self.gradients if g.norm is not None))

    def __repr__(self) -> str:
        found = [f"{len(names)} {kind}" for kind, names in self._findings().items()]
        return f"<GradientHealth of {len(self.gradients)} parameters: {', '.join(found) or 'healthy'}>"

    def _findings(self) -> dict[str, tuple[str, ...]]:
        kinds = ("missing", "NaN", "infinite", "vanishing", "exploding")
        found = (self.missing, self.nan, self.inf, self.vanishing, self.exploding)
        return {kind: names for kind, names in zip(kinds, found, strict=True) if names}

    def _parts(self) -> tuple[Any, ...]:
        kinds: dict[str, list[str]] = {gradient.name: [] for gradient in self.gradients}
        facts = [("total norm", _figure(self.total_norm))]
        for kind, names in self._findings().items():
            facts.append((kind, listed(names, 10)))
            for name in names:
                kinds[name].append(kind)
        if self.healthy:
            facts.append(("findings", "none"))
        rows = []
        for g in self.gradients:
            counts = (str(g.nan or ""), str(g.inf or ""))
            rows.append([g.name, *map(_figure, (g.norm, g.mean, g.max)), *counts, ", ".join(kinds[g.name])])
        numbers = ("norm", "mean", "max", "NaN", "infinite")
        return plain_table(["parameter", *numbers, "findings"], rows, right=numbers), facts_grid(facts)


def gradient_flow(model: nn.Module) -> GradientFlow:
    """Return the mean and maximum of each parameter's gradient, in the order of the layers.

    It reads what a backward pass has left in `.grad` (for an installed model, that of the parameters which
    the model owns), and runs nothing. With a loss scale, the gradients are the scaled ones.

    Parameters
    ----------
    model : torch.nn.Module
        The model, plain or installed, after `backward()`.

    Returns
    -------
    GradientFlow
        The figures. ``print`` shows a table, `plot` draws it. Those of a parameter without a gradient are
        None.

    Raises
    ------
    ConfigError
        `model` is no module, none of its parameters requires a gradient, or none has a gradient.
    """
    found = _gradients_of(model)
    if all(gradient.missing for gradient in found):
        raise ConfigError(
            f"none of the {len(found)} parameters that require a gradient has one; run backward() first, "
            "and look before zero_grad()"
        )
    return GradientFlow(found)


def gradient_health(model: nn.Module, *, vanishing: float = 1e-7, exploding: float = 1e3) -> GradientHealth:
    """Return the norm of each parameter's gradient, and which of them are missing or unhealthy.

    It reads what a backward pass has left in `.grad` (for an installed model, that of the parameters which
    the model owns), and runs nothing. With a loss scale, the gradients are the scaled ones.

    Parameters
    ----------
    model : torch.nn.Module
        The model, plain or installed, after `backward()`. Before it, all gradients are missing.
    vanishing : float
        A gradient with a Euclidean norm below this is vanishing. 0 finds none.
    exploding : float
        A gradient with a Euclidean norm above this is exploding.

    Returns
    -------
    GradientHealth
        The figures. ``print`` shows a table.

    Raises
    ------
    ConfigError
        `model` is no module, none of its parameters requires a gradient, or the thresholds are not numbers
        with 0 <= vanishing < exploding.
    """
    for threshold in (vanishing, exploding):
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise ConfigError(f"a threshold is {threshold!r}; expected a norm, as a number")
    if not 0 <= vanishing < exploding:
        raise ConfigError(
            f"vanishing is {vanishing!r} and exploding is {exploding!r}; expected 0 <= vanishing < exploding"
        )
    found = _gradients_of(model)
    norms = {g.name: g.norm for g in found if g.norm is not None and math.isfinite(g.norm)}
    return GradientHealth(
        gradients=found,
        vanishing_below=float(vanishing),
        exploding_above=float(exploding),
        missing=tuple(g.name for g in found if g.missing),
        nan=tuple(g.name for g in found if g.nan),
        inf=tuple(g.name for g in found if g.inf),
        vanishing=tuple(name for name, norm in norms.items() if norm < vanishing),
        exploding=tuple(name for name, norm in norms.items() if norm > exploding),
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _gradients_of(model: nn.Module) -> tuple[Gradient, ...]:
    """Return figures of the gradient of each parameter that requires one."""
    masters = root_of(model).named_parameters()
    found = tuple(_gradient(name, master) for name, master in masters if master.requires_grad)
    if not found:
        raise ConfigError("no parameter of the model requires a gradient")
    return found


def _gradient(name: str, parameter: torch.Tensor) -> Gradient:
    """Measure a gradient in pieces, so that no copy of a large one is made.

    The figures are computed in float64, so that squares neither overflow nor vanish.
    """
    if isinstance(parameter, UninitializedTensorMixin):
        return Gradient(name, ())
    grad, shape = parameter.grad, tuple(parameter.shape)
    if grad is None or grad.is_meta:  # a meta gradient has a shape, and no values
        return Gradient(name, shape)
    values = grad.detach()
    if values.layout is not torch.strided:
        values = values.to_sparse_coo().coalesce().values()  # type: ignore[no-untyped-call]
    figures = [torch.zeros(5, dtype=torch.float64, device=values.device)]
    for piece in values.reshape(-1).split(_PIECE) if values.numel() else ():  # type: ignore[no-untyped-call]
        sizes = (piece.abs() if piece.is_complex() else piece).double().abs()
        sums = (sizes.sum(), sizes.square().sum(), sizes.isnan().sum(), sizes.isinf().sum())
        figures.append(torch.stack([*sums, sizes.max()]))
    # A single transfer from an accelerator, and so a single wait.
    totals, squares, nans, infs, maxima = zip(*torch.stack(figures).tolist(), strict=True)
    return Gradient(
        name=name,
        shape=shape,
        dtype=grad.dtype,
        mean=sum(totals) / max(1, grad.numel()),
        max=math.nan if any(nans) else max(maxima),
        norm=math.sqrt(sum(squares)),
        nan=int(sum(nans)),
        inf=int(sum(infs)),
    )


def _draw(gradients: Sequence[Gradient], path: str | PathLike[str], title: str) -> None:
    """Draw the mean and maximum of each gradient, and mark those that are missing, all zero or not finite."""
    count = len(gradients)
    names = [shortened(gradient.name, _LETTERS) for gradient in gradients]
    width = min(20.0, max(6.0, 2.5 + 0.24 * min(count, _NAMES)))
    drawn = new_picture(width, 4.5 + 0.07 * max(map(len, names)))  # with room for the names below the axes
    axes = drawn.subplots()
    style(axes)
    # The line of the maximum is broader, and is drawn first, so that it is seen where both are the same.
    maxima, means = [_on_scale(g.max) for g in gradients], [_on_scale(g.mean) for g in gradients]
    dot = 7.0 if count <= _NAMES else 4.0
    axes.plot(maxima, "o-", color=ORANGE, label="maximum", linewidth=2.6, markersize=dot)
    axes.plot(means, "o-", color=BLUE, label="mean", linewidth=1.2, markersize=dot / 2)
    axes.set_yscale("log")
    if all(map(math.isnan, (*maxima, *means))):
        axes.set_ylim(1e-8, 1.0)  # there is no value to choose the limits by
    axes.margins(y=0.1)  # room for the marks
    axes.set_xlim(-0.5, count - 0.5)
    marks = (  # the numbers are heights in the axes, from 0 to 1
        ("no gradient", "x", GREY, 0.02, [g.missing for g in gradients]),
        ("all zero", "v", BLACK, 0.05, [g.max == 0 for g in gradients]),
        ("NaN or infinite", "X", RED, 0.98, [bool(g.nan or g.inf) for g in gradients]),
    )
    for label, marker, colour, height, marked in marks:
        where = [index for index, mark in enumerate(marked) if mark]
        if where:
            place = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            axes.plot(where, [height] * len(where), marker, color=colour, markersize=6, label=label, **place)
    step = -(-count // _NAMES)
    shown = range(0, count, step)
    axes.set_xticks(list(shown), [names[i] for i in shown], rotation=90, fontsize=7)
    each = f", 1 of {step} named" if step > 1 else ""
    axes.set_xlabel(f"{count} parameters in the order of the layers{each}")
    axes.set_ylabel("absolute value of the gradient")
    axes.set_title(title)
    drawn.legend(loc="outside upper right", ncols=5, frameon=False, fontsize=9)  # hides no curve there
    save(drawn, path)


def _on_scale(value: float | None) -> float:
    """Return a value as a logarithmic axis takes it: NaN, which leaves a gap, unless it is above zero."""
    return value if value is not None and math.isfinite(value) and value > 0 else math.nan
