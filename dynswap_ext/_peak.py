"""How much memory of a device is in use now, and was at most."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

__all__ = ["PeakMemory"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """What a model's passes take beside what was there when they began.

    On an accelerator by torch's allocator, whose peak statistics start afresh with it; on the CPU by the
    process's resident set, whose high-water mark does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else getattr(torch, device.type)
        self._begun_at = 0
        self.begin()

    def begin(self) -> None:
        """Look from here on."""
        if self._module is not None:
            self._module.reset_peak_memory_stats(self._device)
            self._begun_at = int(self._module.memory_allocated(self._device))
            return
        with contextlib.suppress(OSError):  # the mark stays: more memory than needed is left free
            _CLEAR_REFS.write_text("5")
        self._begun_at = _kilobytes("VmRSS") * 1024

    def more(self) -> int:
        """Bytes by which the most since the beginning exceeded what was in use then."""
        if self._module is not None:
            return max(0, int(self._module.max_memory_allocated(self._device)) - self._begun_at)
        return max(0, _kilobytes("VmHWM") * 1024 - self._begun_at)


def _kilobytes(name: str) -> int:
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
