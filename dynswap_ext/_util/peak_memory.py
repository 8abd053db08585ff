"""Measures the memory and disk reads of this process, and the peak memory of a device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from dynswap_ext._util.device_memory import DeviceMemory

_PROCESS = Path("/proc/self")
_CPU = torch.device("cpu")


class PeakMemory:
    """Measures how far a device's memory in use rises above what is in use when the object is made.

    On an accelerator this is the memory that torch's allocator gives out; its peak statistics are reset. On
    the CPU it is the resident set of this process, whose peak the kernel records.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self._accelerator = None if device.type == "cpu" else DeviceMemory(device)
        if self._accelerator is not None:
            self._accelerator.reset_peak()
            self._begun_at = self._accelerator.allocated()
            return
        with contextlib.suppress(OSError):  # without a reset, an earlier and higher peak may be measured
            (_PROCESS / "clear_refs").write_text("5")
        self._begun_at = resident_bytes()

    def more(self) -> int:
        """Return by how many bytes the peak since the object was made exceeds what was in use then."""
        peak = _field("status", "VmHWM") * 1024 if self._accelerator is None else self._accelerator.peak()
        return max(0, peak - self._begun_at)


def resident_bytes() -> int:
    """Return the bytes of this process's resident memory; 0 where the system does not tell."""
    return _field("status", "VmRSS") * 1024


def disk_bytes_read() -> int:
    """Return the bytes that this process has read from disks, page faults included; 0 where unknown."""
    return _field("io", "read_bytes")


def _field(file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROCESS / file).read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
