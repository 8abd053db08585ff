"""One copy of a model's weights for all ranks of a host."""

from __future__ import annotations

from dynswap_ext.sharing.share import SharedMasters, share_masters

__all__ = ["SharedMasters", "share_masters"]
