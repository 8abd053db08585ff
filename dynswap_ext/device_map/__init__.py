"""One model over several devices of one process."""

from __future__ import annotations

from dynswap_ext.device_map.install import Handles, install_by_device

__all__ = ["Handles", "install_by_device"]
