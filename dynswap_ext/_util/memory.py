"""Amounts of memory: how a person writes them, and how much a device has free."""

from __future__ import annotations

import math
import os
import re
from typing import Final

import torch

from dynswap_ext.errors import ConfigError

__all__ = ["all_bytes", "first_budget", "format_bytes", "free_bytes", "parse_bytes"]

#: The rest is for activations, until they have been measured.
_FIRST_SHARE: Final = 0.5

_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_AMOUNT: Final = re.compile(r"\s*(?P<number>[+-]?[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)
_FORMS: Final = (
    "expected a number of bytes (6_000_000_000), a string ('6GiB', '512 MB', '1.5e9'), or a fraction of the "
    "free memory as a float over 0 and up to 1.0 (0.5)"
)


def parse_bytes(given: int | float | str, option: str = "budget") -> int | float:
    """Read an amount of memory; `option` is what it was given as, for the error.

    Returns
    -------
    int or float
        Bytes as an int; a fraction of the free memory as a float in (0, 1].

    Raises
    ------
    ConfigError
        If it is none of these, zero or negative; the message names the accepted forms.
    """
    if isinstance(given, bool) or not isinstance(given, (int, float, str)):
        raise ConfigError(f"{option} is {given!r}; {_FORMS}")
    if isinstance(given, float) and 0 < given <= 1:
        return given
    if isinstance(given, float) and given < 1024 and not given.is_integer():
        raise ConfigError(f"{option} is {given!r}; {_FORMS}")
    number = _number(given, option) if isinstance(given, str) else float(given)
    if not math.isfinite(number) or number < 1:
        raise ConfigError(f"{option} is {given!r}; {_FORMS}")
    return given if isinstance(given, int) else int(number)


def _number(text: str, option: str) -> float:
    match = _AMOUNT.fullmatch(text)
    if match is None or match["unit"].lower() not in _UNITS:
        raise ConfigError(f"{option} is {text!r}; {_FORMS}")
    try:
        return float(match["number"]) * float(_UNITS[match["unit"].lower()])
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; {_FORMS}") from None


def format_bytes(amount: int) -> str:
    """Bytes as a person reads them: exact below 1 KiB, else with a binary unit."""
    if amount < 1024:
        return f"{amount} bytes"
    power = min(4, (amount.bit_length() - 1) // 10)
    return f"{amount / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def first_budget(device: torch.device) -> int:
    """Bytes to begin with, while nobody knows what the activations take."""
    return max(1, int(_FIRST_SHARE * free_bytes(device)))


def all_bytes(device: torch.device) -> int:
    """Memory of the device, in bytes."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(getattr(torch, device.type).mem_get_info(device)[1])


def free_bytes(device: torch.device) -> int:
    """Memory that an install on the device could take, in bytes.

    On an accelerator: what the driver has free plus what torch's allocator holds unused. On the CPU: what
    the system could give without swapping.
    """
    if device.type == "cpu":
        return _free_ram()
    module = getattr(torch, device.type)
    try:
        free = int(module.mem_get_info(device)[0])
        return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"the free memory of '{device}' cannot be told here ({error}); give the budget in bytes"
        ) from error


def _free_ram() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(min(int(line.split()[1]) * 1024, _free_in_group()))
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError) as error:
        raise ConfigError(
            "the free memory cannot be told on this system; give the budget in bytes"
        ) from error


def _free_in_group() -> int | float:
    """What the process's control group (a container's limit) leaves, infinite without a limit."""
    folder = "/sys/fs/cgroup"
    try:
        with open(f"{folder}/memory.max", encoding="ascii") as file:
            limit = file.read().strip()
        if limit == "max":
            return math.inf
        with open(f"{folder}/memory.current", encoding="ascii") as file:
            used = int(file.read())
        with open(f"{folder}/memory.stat", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        # Cached file pages count as used, and are given up under pressure.
        return max(0, int(limit) - used + int(counts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return math.inf
