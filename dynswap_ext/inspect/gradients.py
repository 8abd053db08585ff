"""Gradients after a backward pass: how they flow through the layers, and which are not well."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect import _text
from dynswap_ext.inspect._tree import root_of

__all__ = ["Gradient", "GradientFlow", "GradientHealth", "gradient_flow", "gradient_health"]

#: Elements that are looked at in one piece, as float64.
_PIECE: Final = 1 << 22


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter that requires one. Figures are those of absolute values."""

    name: str
    #: Of the parameter.
    shape: tuple[int, ...]
    #: Of the gradient; None if there is none.
    dtype: torch.dtype | None
    #: The mean over all elements, those that a sparse gradient does not store included. NaN or infinite if an
    #: element is; None without a gradient. So are the next two.
    mean: float | None
    max: float | None
    #: Euclidean.
    norm: float | None
    #: Elements that are NaN, and that are infinite.
    nan: int
    inf: int

    @property
    def missing(self) -> bool:
        """Whether there is no gradient."""
        return self.dtype is None


@dataclass(frozen=True, repr=False)
class GradientFlow:
    """What `gradient_flow` found. ``print`` it; rich prints it in colour."""

    #: Each parameter that requires a gradient, once, in the order of the layers.
    gradients: tuple[Gradient, ...]

    def plot(self, path: str | PathLike[str], *, title: str = "Gradient flow") -> None:
        """Draw mean and maximum of each parameter, on a logarithmic scale.

        Parameters
        ----------
        path : path-like
            The picture; its suffix says the format (.png, .svg, .pdf). Written over if it exists.
        title : str
            What stands above it.

        Raises
        ------
        ConfigError
            matplotlib is missing (``pip install dynswap-ext[plot]``), or does not know the suffix.
        """
        from dynswap_ext.inspect._gradient_plot import draw

        draw(self.gradients, path, title)

    def __repr__(self) -> str:
        return f"<GradientFlow of {len(self.gradients)} parameters>"

    def __str__(self) -> str:
        return _text.as_text(self._table())

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """The table, for rich."""
        yield self._table()

    def _table(self) -> Any:
        rows = [[g.name, _text.shape(g.shape), _figure(g.mean), _figure(g.max)] for g in self.gradients]
        return _text.table(["parameter", "shape", "mean", "max"], rows, right=("mean", "max"))


@dataclass(frozen=True, repr=False)
class GradientHealth:
    """What `gradient_health` found. ``print`` it; rich prints it in colour."""

    #: Each parameter that requires a gradient, once, in the order of the layers.
    gradients: tuple[Gradient, ...]
    #: Norms below and above these are findings.
    vanishing_below: float
    exploding_above: float
    #: Names of parameters, by finding: without a gradient, with NaN or infinite elements, and with a norm
    #: that is too small or too large.
    missing: tuple[str, ...]
    nan: tuple[str, ...]
    inf: tuple[str, ...]
    vanishing: tuple[str, ...]
    exploding: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no finding."""
        return not any(names for _, names in self._findings())

    @property
    def total_norm(self) -> float:
        """Of all gradients together, as `torch.nn.utils.clip_grad_norm_` measures it."""
        return math.hypot(*(g.norm for g in self.gradients if g.norm is not None))

    def __repr__(self) -> str:
        found = [f"{len(names)} {kind}" for kind, names in self._findings() if names]
        return f"<GradientHealth of {len(self.gradients)} parameters: {', '.join(found) or 'healthy'}>"

    def __str__(self) -> str:
        return _text.as_text(*self._parts())

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """The table and the findings, for rich."""
        yield from self._parts()

    def _findings(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return (
            ("missing", self.missing),
            ("NaN", self.nan),
            ("infinite", self.inf),
            ("vanishing", self.vanishing),
            ("exploding", self.exploding),
        )

    def _parts(self) -> tuple[Any, Any]:
        of: dict[str, list[str]] = {}
        for kind, names in self._findings():
            for name in names:
                of.setdefault(name, []).append(kind)
        rows = [
            [
                g.name,
                _figure(g.norm),
                _figure(g.mean),
                _figure(g.max),
                str(g.nan or ""),
                str(g.inf or ""),
                ", ".join(of.get(g.name, [])),
            ]
            for g in self.gradients
        ]
        numbers = ("norm", "mean", "max", "NaN", "infinite")
        facts = [("total norm", _figure(self.total_norm))]
        facts += [(kind, _text.some(names)) for kind, names in self._findings() if names]
        if self.healthy:
            facts.append(("findings", "none"))
        return _text.table(["parameter", *numbers, "findings"], rows, right=numbers), _text.facts(facts)


def gradient_flow(model: nn.Module) -> GradientFlow:
    """Mean and maximum of each parameter's gradient, in the order of the layers.

    Looks at what a backward pass has left in `.grad`; runs nothing. An installed model's gradients are on its
    masters, and these are looked at. Gradients under a loss scale are the scaled ones.

    Parameters
    ----------
    model : torch.nn.Module
        Plain or installed, after `backward()`.

    Returns
    -------
    GradientFlow
        Data; ``print`` shows a table, `plot` draws it. A parameter without a gradient has None.

    Raises
    ------
    ConfigError
        `model` is no module, no parameter of it requires a gradient, or none has one.
    """
    found = _gradients(model)
    if all(gradient.missing for gradient in found):
        raise ConfigError(
            f"none of the {len(found)} parameters that require a gradient has one; run backward() first, "
            "and look before zero_grad()"
        )
    return GradientFlow(found)


def gradient_health(model: nn.Module, *, vanishing: float = 1e-7, exploding: float = 1e3) -> GradientHealth:
    """Norm, NaN and infinite elements of each parameter's gradient, and which are not well.

    Looks at what a backward pass has left in `.grad`; runs nothing. An installed model's gradients are on its
    masters, and these are looked at. Gradients under a loss scale are the scaled ones.

    Parameters
    ----------
    model : torch.nn.Module
        Plain or installed, after `backward()`. Before it, all gradients are found missing.
    vanishing : float
        A Euclidean norm below this is a finding; so is 0, unless this is 0.
    exploding : float
        A Euclidean norm above this is a finding.

    Returns
    -------
    GradientHealth
        Data; ``print`` shows a table.

    Raises
    ------
    ConfigError
        `model` is no module, no parameter of it requires a gradient, or the thresholds are no numbers with
        0 <= vanishing < exploding.
    """
    for threshold in (vanishing, exploding):
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise ConfigError(f"a threshold is {threshold!r}; expected a norm, as a number")
    if not 0 <= vanishing < exploding:
        raise ConfigError(
            f"vanishing is {vanishing!r} and exploding is {exploding!r}; expected 0 <= vanishing < exploding"
        )
    found = _gradients(model)
    finite = [g for g in found if g.norm is not None and math.isfinite(g.norm)]
    return GradientHealth(
        gradients=found,
        vanishing_below=float(vanishing),
        exploding_above=float(exploding),
        missing=tuple(g.name for g in found if g.missing),
        nan=tuple(g.name for g in found if g.nan),
        inf=tuple(g.name for g in found if g.inf),
        vanishing=tuple(g.name for g in finite if g.norm is not None and g.norm < vanishing),
        exploding=tuple(g.name for g in finite if g.norm is not None and g.norm > exploding),
    )


def _gradients(model: nn.Module) -> tuple[Gradient, ...]:
    root = root_of(model)
    # Of an installed model these are the masters.
    wanted = [(name, master) for name, master in root.named_parameters() if master.requires_grad]
    if not wanted:
        raise ConfigError("no parameter of the model requires a gradient")
    return tuple(_gradient(name, master) for name, master in wanted)


def _gradient(name: str, parameter: torch.Tensor) -> Gradient:
    grad = parameter.grad
    if isinstance(parameter, UninitializedTensorMixin):
        return Gradient(name, (), None, None, None, None, 0, 0)
    shape = tuple(parameter.shape)
    if grad is None or grad.is_meta:  # a meta gradient has a shape, and no values
        return Gradient(name, shape, None, None, None, None, 0, 0)
    with torch.no_grad():
        total, largest, squares, nan, inf = _measured(grad)
    count = grad.numel()
    return Gradient(
        name=name,
        shape=shape,
        dtype=grad.dtype,
        mean=total / count if count else 0.0,
        max=largest,
        norm=math.sqrt(squares) if not math.isnan(squares) else math.nan,
        nan=nan,
        inf=inf,
    )


def _measured(grad: torch.Tensor) -> tuple[float, float, float, int, int]:
    """Sum, maximum and sum of squares of absolute values; elements that are NaN, and infinite.

    A piece at a time, so that no copy of a large gradient is made; in float64, so that squares neither
    overflow nor vanish.
    """
    values = grad.detach()
    if values.layout is not torch.strided:
        values = values.to_sparse_coo().coalesce().values()  # type: ignore[no-untyped-call]
    wide = torch.float32 if values.device.type == "mps" else torch.float64  # that device has no float64
    total, largest, squares, nan, inf = 0.0, 0.0, 0.0, 0, 0
    pieces: tuple[torch.Tensor, ...] = values.reshape(-1).split(_PIECE)  # type: ignore[no-untyped-call]
    for piece in pieces:
        if not piece.numel():
            continue
        sizes = (piece.abs() if piece.is_complex() else piece).to(wide).abs()
        figures = (sizes.sum(), sizes.max(), sizes.square().sum(), sizes.isnan().sum(), sizes.isinf().sum())
        # One transfer, and so one wait, for a piece on an accelerator.
        found = torch.stack([figure.to(wide) for figure in figures]).tolist()
        total += found[0]
        largest = found[1] if math.isnan(found[1]) or found[1] > largest else largest
        squares += found[2]
        nan += int(found[3])
        inf += int(found[4])
    return total, largest, squares, nan, inf


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
