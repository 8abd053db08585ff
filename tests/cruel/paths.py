"""Lets a script of this folder import the checkout and the pretend device."""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(_TESTS.parent), str(_TESTS / "device")]
