"""The C library's heap, which keeps what a program frees."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_malloc_trim: Callable[[int], object] = getattr(
    ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", lambda _: None
)


class HeapTrimmer:
    """Returns free pages of the heap to the system, each time that a window of bytes has been counted.

    It does nothing where the C library is not glibc.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._counted = 0

    def count(self, nbytes: int) -> None:
        """Count bytes that were freed, or that were allocated with gaps between them."""
        self._counted += nbytes
        if self._counted > self._window:
            self.trim()

    def trim(self) -> None:
        """Return the free pages now."""
        self._counted = 0
        _malloc_trim(0)
