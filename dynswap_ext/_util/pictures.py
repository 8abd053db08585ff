"""What all pictures of this package share: colours, style, and writing to a file without a screen."""

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
    """Return an empty figure of so many inches, without a window. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"pictures need matplotlib, which cannot be imported ({error}); install it with "
            "`pip install dynswap-ext[plot]`"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")  # type: ignore[no-untyped-call,unused-ignore]


def byte_scale(most: int) -> tuple[float, str]:
    """Return the size and the name of the unit for an axis that ends at `most` bytes."""
    power = min(4, (most.bit_length() - 1) // 10)
    return 1024.0**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]


def style(axes: Any, *, grid: str = "y") -> None:
    """Remove the frame at the top and the right, and draw a light grid behind the data.

    `grid` names the axes that have grid lines: "x", "y", "both" or "".
    """
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
    """Write a picture in the format that the path's suffix names. Raises ConfigError if that fails."""
    where = check_path(path)
    with explained(where):
        drawn.savefig(where, dpi=dots_per_inch)
    return where
