"""Checkpoints: masters mapped from files without reading them, and written, converted and looked at."""

from __future__ import annotations

from dynswap_ext.checkpoint.convert import Conversion, convert
from dynswap_ext.checkpoint.load import load
from dynswap_ext.checkpoint.save import save
from dynswap_ext.checkpoint.summary import Summary, summary
from dynswap_ext.checkpoint.verify import verify

__all__ = ["Conversion", "Summary", "convert", "load", "save", "summary", "verify"]
