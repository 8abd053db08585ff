"""Amounts of memory: how a person writes them, and how much a device has free."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

import torch

from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext.errors import ConfigError

#: Budgets by name: what the measured calls leave, and only what `prefetch` needs.
AUTO: Final = "auto"
MINIMUM: Final = "minimum"
#: The rest is for activations, until they have been measured.
_FIRST_SHARE: Final = 0.5

_AVAILABLE: Final = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_GROUPS: Final = Path("/sys/fs/cgroup")
_GROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
#: The files with a control group's limit and its use, and the fields of memory.stat that count cached pages
#: of files. These count as used, but the system takes them back before the limit is reached: those that were
#: read once (inactive) first, then the others. The machine's MemAvailable has both lists, too.
_FILES_OF_VERSION_1: Final = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_FILES_OF_VERSION_2: Final = ("memory.max", "memory.current", ("inactive_file", "active_file"))
#: Without a limit, version 1 has the largest number that is whole pages.
_NO_LIMIT: Final = 1 << 62

_AMOUNT: Final = re.compile(r"\s*([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_BYTES: Final = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1.0),
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


def is_named(budget: object, name: str) -> bool:
    """Return whether a budget is given by this name, in any case."""
    return isinstance(budget, str) and budget.strip().lower() == name


def parse_bytes(
    given: int | float | str,
    option: str = "budget",
    names: Sequence[str] = (),
    *,
    meaning: str = "",
    of: str = "the free memory",
) -> int | float:
    """Read an amount of memory: bytes as an int, a fraction of the free memory as a float in (0, 1].

    For the ConfigError: `option` is what it was given as, `names` are what it may be instead, `meaning` is
    what else is expected, in words that end in a comma and a space, and a fraction is one `of` that. A unit
    of one letter is binary, as most tools have it: 6G is 6 GiB.
    """
    fraction: float | Fraction | None = given if isinstance(given, float) else None
    if isinstance(given, str) and re.search(r"[%/]|^\s*0?\.", given):
        fraction = parse_fraction(given)
    if fraction is not None and 0 < fraction <= 1:
        return float(fraction)
    number, hint = math.nan, ""
    if isinstance(given, str):
        number = parse_amount(given, _BYTES)
    elif isinstance(given, float) and 1 < given < 1024:
        hint = f". Did you mean '{given:g}GiB'?"
    elif isinstance(given, (int, float)):
        number = float(given) if given < 1 << 1000 else math.inf
    if isinstance(given, bool) or not math.isfinite(number) or number < 1:
        also = "".join(f", or {name!r}" for name in names)
        if isinstance(given, str):
            hint = did_you_mean(given.strip().lower(), names)
        raise ConfigError(
            f"{option} is {given!r}; expected {meaning}a number of bytes (6_000_000_000), a string ('6GiB', "
            f"'512 MB', '1.5e9'), or a fraction of {of} over 0 and up to 1.0 (0.5, '50%' or '1/2')"
            f"{also}{hint}"
        )
    return given if isinstance(given, int) else int(number)


def parse_fraction(text: str) -> Fraction | None:
    """Return the value of "50%", "1/2" or "0.5"; None for a text of another form."""
    try:
        return Fraction(text.strip().removesuffix("%")) / (100 if "%" in text else 1)
    except (ValueError, ZeroDivisionError):
        return None


def format_bytes(given: float | None) -> str:
    """Write bytes as a person reads them: exact below 1 KiB, else with a binary unit; a dash for None."""
    if given is None:
        return "-"
    amount = round(given)
    if abs(amount) < 1024:
        return f"{amount} byte" if amount == 1 else f"{amount} bytes"
    power = min(4, (amount.bit_length() - 1) // 10)
    return f"{amount / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def exact_bytes(amount: int) -> str:
    """Write bytes with a binary unit, and exactly: 1.5 GiB (1610612736 bytes)."""
    return format_bytes(amount) if amount < 1024 else f"{format_bytes(amount)} ({amount} bytes)"


def first_budget(device: torch.device, headroom: int | None = None) -> int:
    """Return the bytes of an automatic budget until the activations have been measured."""
    free = free_bytes(device)
    return max(1, min(int(_FIRST_SHARE * free), free - (headroom or 0)))


def ram_limit() -> int:
    """Return how much RAM this process may use: the machine's, or less if a control group limits it."""
    limits = (group.most() for group in _control_groups())
    return int(min((all_bytes(torch.device("cpu")), *limits)))


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


def free_for_others(device: torch.device) -> int:
    """Return the memory that other processes could take, in bytes: what torch's allocator keeps is ours."""
    return _free_ram() if device.type == "cpu" else DeviceMemory(device).free_for_others()


class _MemoryStatus(ctypes.Structure):
    """The structure MEMORYSTATUSEX of Windows."""

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
        available = _AVAILABLE.search(Path("/proc/meminfo").read_text())
        if available:
            return int(min(int(available[1]) * 1024, _free_in_group()))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_group() -> int | float:
    """Return the RAM that the process's control groups (a container's limit) leave; infinite without a limit.

    Each group above the process's own may have a limit. In a container they are often not visible, and its
    own group is the root.
    """
    return min((group.free() for group in _control_groups()), default=math.inf)


def _control_groups() -> Iterator[_ControlGroup]:
    """Yield the control groups of the process that count memory, as far as they can be seen."""
    try:
        lines = _GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, files = _GROUPS, _FILES_OF_VERSION_2
        elif "memory" in controllers.split(","):
            root, files = _GROUPS / "memory", _FILES_OF_VERSION_1
        else:
            continue
        folder = root
        yield _ControlGroup(folder, *files)
        for part in path.split("/"):
            if part not in ("", ".."):
                folder /= part
                yield _ControlGroup(folder, *files)


class _ControlGroup(NamedTuple):
    """A control group that counts memory."""

    folder: Path
    limit: str
    used: str
    cached: tuple[str, str]

    def most(self) -> int | float:
        """Return the limit, infinite without one."""
        try:
            limit = int((self.folder / self.limit).read_text())
        except (OSError, ValueError):  # "max" is no number
            return math.inf
        return limit if limit < _NO_LIMIT else math.inf

    def free(self) -> int | float:
        """Return what the limit leaves."""
        limit = self.most()
        if limit == math.inf:
            return limit
        try:
            used = int((self.folder / self.used).read_text())
            counts = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return math.inf
        return max(0, limit - used + sum(int(counts.get(field, 0)) for field in self.cached))
