"""Gradients after a backward pass: how they flow through the layers, and which are unhealthy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import nn

from dynswap_ext._util.tables import Printable, facts_grid, first_names, plain_table, shape_text
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect import _gradient_plot
from dynswap_ext.inspect._gradient_figures import Gradient, gradients_of

__all__ = ["Gradient", "GradientFlow", "GradientHealth", "gradient_flow", "gradient_health"]


@dataclass(frozen=True, repr=False)
class GradientFlow(Printable):
    """The result of `gradient_flow`. ``print`` it; rich prints it in colour."""

    #: Each parameter that requires a gradient, once, in the order of the layers.
    gradients: tuple[Gradient, ...]

    def plot(self, path: str | PathLike[str], *, title: str = "Gradient flow") -> None:
        """Draw mean and maximum of each parameter, on a logarithmic scale.

        Parameters
        ----------
        path : path-like
            The picture; its suffix says the format (.png, .svg, .pdf). Written over if it exists.
        title : str
            Over the picture.

        Raises
        ------
        ConfigError
            matplotlib is missing (``pip install dynswap-ext[plot]``), or does not know the suffix.
        """
        _gradient_plot.draw(self.gradients, path, title)

    def __repr__(self) -> str:
        return f"<GradientFlow of {len(self.gradients)} parameters>"

    def _parts(self) -> tuple[Any, ...]:
        rows = [[g.name, shape_text(g.shape), _figure(g.mean), _figure(g.max)] for g in self.gradients]
        return (plain_table(["parameter", "shape", "mean", "max"], rows, right=("mean", "max")),)


@dataclass(frozen=True, repr=False)
class GradientHealth(Printable):
    """The result of `gradient_health`. ``print`` it; rich prints it in colour."""

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
        return not self._findings()

    @property
    def total_norm(self) -> float:
        """Of all gradients together, as `torch.nn.utils.clip_grad_norm_` measures it."""
        return math.hypot(*(g.norm for g in self.gradients if g.norm is not None))

    def __repr__(self) -> str:
        found = [f"{len(names)} {kind}" for kind, names in self._findings().items()]
        return f"<GradientHealth of {len(self.gradients)} parameters: {', '.join(found) or 'healthy'}>"

    def _findings(self) -> dict[str, tuple[str, ...]]:
        found = {
            "missing": self.missing,
            "NaN": self.nan,
            "infinite": self.inf,
            "vanishing": self.vanishing,
            "exploding": self.exploding,
        }
        return {kind: names for kind, names in found.items() if names}

    def _parts(self) -> tuple[Any, ...]:
        kinds: dict[str, list[str]] = {}
        for kind, names in self._findings().items():
            for name in names:
                kinds.setdefault(name, []).append(kind)
        rows = [
            [
                *(g.name, _figure(g.norm), _figure(g.mean), _figure(g.max)),
                *(str(g.nan or ""), str(g.inf or ""), ", ".join(kinds.get(g.name, []))),
            ]
            for g in self.gradients
        ]
        numbers = ("norm", "mean", "max", "NaN", "infinite")
        facts = [("total norm", _figure(self.total_norm))]
        facts += [(kind, first_names(names)) for kind, names in self._findings().items()]
        if self.healthy:
            facts.append(("findings", "none"))
        return plain_table(["parameter", *numbers, "findings"], rows, right=numbers), facts_grid(facts)


def gradient_flow(model: nn.Module) -> GradientFlow:
    """Return mean and maximum of each parameter's gradient, in the order of the layers.

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
    found = gradients_of(model)
    if all(gradient.missing for gradient in found):
        raise ConfigError(
            f"none of the {len(found)} parameters that require a gradient has one; run backward() first, "
            "and look before zero_grad()"
        )
    return GradientFlow(found)


def gradient_health(model: nn.Module, *, vanishing: float = 1e-7, exploding: float = 1e3) -> GradientHealth:
    """Return norm, NaN and infinite elements of each parameter's gradient, and which are unhealthy.

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
    found = gradients_of(model)
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
