"""Warnings that point at the caller's line, however deep in the package they arise."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Final

from ._logging import logger
from .errors import DynswapWarning

__all__ = ["warn"]

_PACKAGE: Final = str(Path(__file__).parent)


def warn(message: str) -> None:
    """Warn, on behalf of the first frame that is not the package's own."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    logger.warning("%s", message)
    warnings.warn(message, DynswapWarning, stacklevel=level)
