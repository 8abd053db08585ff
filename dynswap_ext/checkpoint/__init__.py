"""Models whose masters are mapped from a checkpoint file: nothing is read until it is needed."""

from __future__ import annotations

from dynswap_ext.checkpoint.load import load

__all__ = ["load"]
