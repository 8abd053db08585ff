"""Warnings that point at the caller's line, however deep in the package they arise."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from dynswap_ext._util.log import logger
from dynswap_ext.errors import DynswapWarning

_PACKAGE: Final = Path(__file__).parents[1]
_NOT_THE_CALLER: Final = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, Path(str(torch.__file__)).parent))


def caller(passing_on: Collection[str] = ()) -> FrameType:
    """Return the innermost frame outside this package, torch and the functions named in `passing_on`.

    The functions in `passing_on` only pass a call on to torch, so a warning is meant for their caller.
    """
    frame = sys._getframe()  # in a thread of autograd it has no frame before it
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_NOT_THE_CALLER) or frame.f_code.co_name in passing_on
    ):
        frame = frame.f_back
    return frame


def warn(message: str, *, always: bool = False, frame: FrameType | None = None) -> None:
    """Log a message, and issue it as a DynswapWarning of the line that `frame` runs. Default: the `caller`'s.

    `always` shows the warning even if that line has caused it before, as it is about another install.
    """
    frame = caller() if frame is None else frame
    logger.warning("%s", message)
    shown = {} if always else frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__") or "<unknown>"
    warnings.warn_explicit(
        message, DynswapWarning, frame.f_code.co_filename, frame.f_lineno, name, registry=shown
    )
