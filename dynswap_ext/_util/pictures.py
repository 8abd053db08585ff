"""Pictures without a screen: what all of them share."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Final

from dynswap_ext._util.written_files import check_folder, explained
from dynswap_ext.errors import ConfigError

# Okabe and Ito's colours, which can be told apart with any colour vision.
BLACK: Final = "#000000"
BLUE: Final = "#0072B2"
GREEN: Final = "#009E73"
ORANGE: Final = "#E69F00"
PINK: Final = "#CC79A7"
RED: Final = "#D55E00"
GREY: Final = "#767676"
DASHED: Final = (0, (5, 3))


def new_picture(width: float, height: float) -> Any:
    """Return an empty picture, in inches, that belongs to no window; ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"pictures need matplotlib, which cannot be imported ({error}); install it with "
            "`pip install dynswap-ext[plot]`"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")  # type: ignore[no-untyped-call,unused-ignore]


def byte_scale(most: int) -> tuple[float, str]:
    """Return the unit for an axis of up to so many bytes: its size and its name."""
    power = min(4, (most.bit_length() - 1) // 10)
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


def style(axes: Any, *, grid: str = "y") -> None:
    """Draw no frame at the top and the right, and a light grid behind all else ("x", "y", "both" or "")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color="#E4E4E4", linewidth=0.6)


def check_path(path: str | PathLike[str]) -> Path:
    """Return a picture's path if its suffix is known and its folder exists; else raise ConfigError."""
    where = Path(path)
    if where.suffix.removeprefix(".").lower() not in new_picture(1, 1).canvas.get_supported_filetypes():
        raise ConfigError(f"{where} cannot be drawn: expected an ending such as .png, .svg or .pdf")
    return check_folder(where, "picture")


def save(drawn: Any, path: str | PathLike[str], *, dots_per_inch: int = 150) -> Path:
    """Write a picture in the format that the path's suffix says; ConfigError if that cannot be done."""
    where = check_path(path)
    with explained(where):
        drawn.savefig(where, dpi=dots_per_inch)
    return where
