"""Opens, loads, saves, converts and verifies checkpoints. Loaded weights are mapped from their files."""

from __future__ import annotations

from dynswap_ext.checkpoint.convert import Conversion, convert
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.load import load
from dynswap_ext.checkpoint.loading.skeleton import init_empty
from dynswap_ext.checkpoint.pretrained import from_pretrained
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.checkpoint.save import save
from dynswap_ext.checkpoint.summary import Summary, summary
from dynswap_ext.checkpoint.verify import verify

__all__ = [
    "Checkpoint",
    "Conversion",
    "Entry",
    "Summary",
    "convert",
    "from_pretrained",
    "init_empty",
    "load",
    "open_checkpoint",
    "save",
    "summary",
    "verify",
]
