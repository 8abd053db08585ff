"""Amounts of memory: how a person writes them, and how much a device has free."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Final

import torch

from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext.errors import ConfigError

#: The rest is for activations, until they have been measured.
_FIRST_SHARE: Final = 0.5

_AMOUNT: Final = re.compile(r"\s*([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_BYTES: Final = {
    "": 1.0,
    "b": 1.0,
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix: 1024.0**power for power, prefix in enumerate("kmgt", start=1)},
}


def parse_amount(text: str, units: Mapping[str, float]) -> float:
    """Return a number times its unit, one of `units` in lower case; NaN if the text has another form."""
    match = _AMOUNT.fullmatch(text)
    if match and match[2].lower() in units:
        with contextlib.suppress(ValueError):  # "1.2.3"
            return float(match[1]) * units[match[2].lower()]
    return math.nan


def parse_bytes(given: int | float | str, option: str = "budget") -> int | float:
    """Read an amount of memory: bytes as an int, a fraction of the free memory as a float in (0, 1].

    `option` is what it was given as, for the ConfigError that names the accepted forms. A unit of one letter
    is binary, as most tools have it: 6G is 6 GiB.
    """
    fraction: float | Fraction | None = given if isinstance(given, float) else None
    if isinstance(given, str) and re.search("[%/]", given):
        fraction = parse_fraction(given)
    if fraction is not None and 0 < fraction <= 1:
        return float(fraction)
    number, hint = math.nan, ""
    if isinstance(given, str):
        number = parse_amount(given, _BYTES)
    elif isinstance(given, float) and 1 < given < 1024:
        hint = f". Is '{given:g}GiB' meant?"
    elif isinstance(given, (int, float)):
        number = float(given) if given < 1 << 1000 else math.inf
    if isinstance(given, bool) or not math.isfinite(number) or number < 1:
        raise ConfigError(
            f"{option} is {given!r}; expected a number of bytes (6_000_000_000), a string ('6GiB', '512 MB', "
            f"'1.5e9'), or a fraction of the free memory over 0 and up to 1.0 (0.5, '50%' or '1/2'){hint}"
        )
    return given if isinstance(given, int) else int(number)


def parse_fraction(text: str) -> Fraction | None:
    """Return the value of "50%", "1/2" or "0.5"; None for a text of another form."""
    try:
        return Fraction(text.strip().removesuffix("%")) / (100 if "%" in text else 1)
    except (ValueError, ZeroDivisionError):
        return None


def format_bytes(amount: int) -> str:
    """Write bytes as a person reads them: exact below 1 KiB, else with a binary unit."""
    if amount < 1024:
        return f"{amount} bytes"
    power = min(4, (amount.bit_length() - 1) // 10)
    return f"{amount / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def first_budget(device: torch.device) -> int:
    """Return the bytes to begin with, while it is not known what the activations take."""
    return max(1, int(_FIRST_SHARE * free_bytes(device)))


def all_bytes(device: torch.device) -> int:
    """Return the memory of the device, in bytes."""
    if device.type == "cpu":
        if not hasattr(os, "sysconf"):
            return _ram_of_windows().ullTotalPhys
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory(device).total()


def free_bytes(device: torch.device) -> int:
    """Return the memory that an install on the device could take, in bytes.

    On an accelerator: what the driver has free plus what torch's allocator holds unused. On the CPU: what
    the system could give without swapping.
    """
    try:
        return _free_ram() if device.type == "cpu" else DeviceMemory(device).free()
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the free memory of '{device}' cannot be told here ({error}); give the budget in bytes"
        ) from error


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    ullTotalPhys: int
    ullAvailPhys: int
    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _ram_of_windows() -> _MemoryStatus:
    status = _MemoryStatus(dwLength=ctypes.sizeof(_MemoryStatus))
    if not getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # noqa: B009
        raise OSError("GlobalMemoryStatusEx failed")
    return status


def _free_ram() -> int:
    if not hasattr(os, "sysconf"):
        return _ram_of_windows().ullAvailPhys
    with contextlib.suppress(OSError):
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if available:
            return int(min(int(available[1]) * 1024, _free_in_group()))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_group() -> int | float:
    """Return what the process's control group (a container's limit) leaves, infinite without a limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max" is no number
        return math.inf
    # Cached file pages count as used, and are given up under pressure.
    return max(0, limit - used + int(counts.get("inactive_file", 0)))
