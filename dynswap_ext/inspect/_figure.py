"""Pictures without a screen."""

from __future__ import annotations

from os import PathLike
from typing import Any

from dynswap_ext.errors import ConfigError

__all__ = ["figure", "save"]


def figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that no window knows of.

    Raises
    ------
    ConfigError
        matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"pictures are drawn by matplotlib, which is not here ({error}); install it with "
            "`pip install dynswap-ext[plot]`"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")  # type: ignore[no-untyped-call,unused-ignore]


def save(drawn: Any, path: str | PathLike[str]) -> None:
    """Write a figure in the format that the path's suffix says.

    Raises
    ------
    ConfigError
        There is no such format.
    """
    try:
        drawn.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be drawn: {error}") from error
