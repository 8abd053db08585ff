"""GGUF's quantised weights as masters: what they are, how they are decoded, and whose names they have."""

from __future__ import annotations

from dynswap_ext.checkpoint.gguf.names import names_for, original_rows
from dynswap_ext.checkpoint.gguf_tensors.tensor import GGUFTensor

__all__ = ["GGUFTensor", "names_for", "original_rows"]
