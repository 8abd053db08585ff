"""Gives a benchmark the tests' pretend GPU, if it is imported before torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "device"))

import pretend_cuda

#: The reason why there is no pretend GPU here; empty if there is one.
unavailable = ""
try:
    pretend_cuda.activate()
except pretend_cuda.Unavailable as error:
    unavailable = str(error)
