"""Figures of gradients that a backward pass has left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._tree import root_of

__all__ = ["Gradient", "gradients_of"]

#: Elements that are looked at in one piece, as float64.
_PIECE: Final = 1 << 22


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter that requires one. Figures are those of absolute values."""

    name: str
    #: Of the parameter.
    shape: tuple[int, ...]
    #: Of the gradient; None if there is none.
    dtype: torch.dtype | None = None
    #: The mean over all elements, those that a sparse gradient does not store included. NaN or infinite if an
    #: element is; None without a gradient. So are the next two.
    mean: float | None = None
    max: float | None = None
    #: Euclidean.
    norm: float | None = None
    #: Elements that are NaN, and that are infinite.
    nan: int = 0
    inf: int = 0

    @property
    def missing(self) -> bool:
        """Whether there is no gradient."""
        return self.dtype is None


def gradients_of(model: nn.Module) -> tuple[Gradient, ...]:
    """Return figures of each parameter that requires a gradient; of an installed model, of its masters.

    Raises
    ------
    ConfigError
        It is no module, or no parameter of it requires a gradient.
    """
    masters = root_of(model).named_parameters()
    found = tuple(_gradient(name, master) for name, master in masters if master.requires_grad)
    if not found:
        raise ConfigError("no parameter of the model requires a gradient")
    return found


def _gradient(name: str, parameter: torch.Tensor) -> Gradient:
    if isinstance(parameter, UninitializedTensorMixin):
        return Gradient(name, ())
    grad, shape = parameter.grad, tuple(parameter.shape)
    if grad is None or grad.is_meta:  # a meta gradient has a shape, and no values
        return Gradient(name, shape)
    with torch.no_grad():
        total, largest, squares, nan, inf = _measured(grad)
    mean = total / grad.numel() if grad.numel() else 0.0
    norm = math.sqrt(squares) if not math.isnan(squares) else math.nan
    return Gradient(name, shape, grad.dtype, mean, largest, norm, nan, inf)


def _measured(grad: torch.Tensor) -> tuple[float, float, float, int, int]:
    """Return sum, maximum and sum of squares of absolute values; elements that are NaN, and infinite.

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
