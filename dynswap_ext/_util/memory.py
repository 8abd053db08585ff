"""Amounts of memory as people write and read them, and the memory that a device has, in all and free."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

import torch

from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext.errors import ConfigError

#: The budget that leaves as much memory as measured calls of the model need for activations.
AUTO: Final = "auto"
#: The budget that holds no more than what `prefetch` needs.
MINIMUM: Final = "minimum"
#: The part of the bound of `activations=` that stays on the device if a step saves more; the rest is for what
#: is on its way (SavedOffload::make_room in csrc/session/offload.cpp).
KEPT_OF_BOUND: Final = 0.75
#: The share of the free memory that an automatic budget takes until activations have been measured.
_FIRST_SHARE: Final = 0.5

_AVAILABLE: Final = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_GROUPS: Final = Path("/sys/fs/cgroup")
_GROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
#: For each version of control groups: the files with a group's limit and its use, and the fields of
#: memory.stat that count cached pages of files. Such pages count as used, but the system frees them before
#: the limit is reached: first those that were read once (inactive), then the others. The machine's
#: MemAvailable counts both as available, too.
_FILES_OF_VERSION_1: Final = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_FILES_OF_VERSION_2: Final = ("memory.max", "memory.current", ("inactive_file", "active_file"))
#: A group of version 1 without a limit shows a larger number than this, the largest multiple of a page.
_NO_LIMIT: Final = 1 << 62

_AMOUNT: Final = re.compile(r"\s*([+-]?[\d.]+(?:e[+-]?\d+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_BYTES: Final = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1.0),
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix: 1024.0**power for power, prefix in enumerate("kmgt", start=1)},
}


def parse_amount(text: str, units: Mapping[str, float]) -> float:
    """Return the value of a number with a unit, such as "1.5 GiB"; NaN if the text has another form.

    `units` has the value of each unit by its name in lower case.
    """
    match = _AMOUNT.fullmatch(text)
    if match and match[2].lower() in units:
        with contextlib.suppress(ValueError):  # "1.2.3"
            return float(match[1]) * units[match[2].lower()]
    return math.nan


def is_named(budget: object, name: str) -> bool:
    """Return whether a budget is this name, such as "auto", in upper or lower case."""
    return isinstance(budget, str) and budget.strip().lower() == name


def parse_bytes(
    given: int | float | str,
    option: str = "budget",
    names: Sequence[str] = (),
    *,
    of: str = "the free memory",
) -> int | float:
    """Read an amount of memory: bytes as an int, or a fraction of some memory as a float in (0, 1].

    A unit of one letter is binary, as in most tools: "6G" is 6 GiB.

    Parameters
    ----------
    given
        The amount as a user wrote it.
    option, names, of
        For the message of the ConfigError: the option that was given, names that it takes as well, and the
        memory that a fraction is a fraction of.
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
            f"{option} is {given!r}; expected a number of bytes (6_000_000_000), a string ('6GiB', '512 MB', "
            f"'1.5e9'), or a fraction of {of} over 0 and up to 1.0 (0.5, '50%' or '1/2'){also}{hint}"
        )
    return min(sys.maxsize, given if isinstance(given, int) else int(number))


def parse_fraction(text: str) -> Fraction | None:
    """Return the value of "50%", "1/2" or "0.5"; None for a text of another form."""
    try:
        return Fraction(text.strip().removesuffix("%")) / (100 if "%" in text else 1)
    except (ValueError, ZeroDivisionError):
        return None


def format_bytes(given: float | None) -> str:
    """Return a number of bytes as text: exact below 1 KiB, else with a binary unit; "-" for None."""
    if given is None:
        return "-"
    amount = round(given)
    if abs(amount) < 1024:
        return f"{amount} byte" if amount == 1 else f"{amount} bytes"
    power = min(4, (amount.bit_length() - 1) // 10)
    return f"{amount / 1024**power:.4g} {'KMGT'[power - 1]}iB"


def exact_bytes(amount: int) -> str:
    """Return a number of bytes as text, with a binary unit and exactly: 1.5 GiB (1610612736 bytes)."""
    return format_bytes(amount) if amount < 1024 else f"{format_bytes(amount)} ({amount} bytes)"


def first_budget(device: torch.device, headroom: int | None = None) -> int:
    """Return the bytes of an automatic budget before activations have been measured: half of the free memory.

    They are fewer if less than `headroom` bytes would stay free.
    """
    free = free_bytes(device)
    return max(1, min(int(_FIRST_SHARE * free), free - (headroom or 0)))


def first_activations(device: torch.device) -> int:
    """Return the bytes for tensors saved for backward until they are measured: a quarter of what is free."""
    return max(1, int(_FIRST_SHARE * free_bytes(device)) // 2)


def share_of_saved(room: int, weights: int, saved: int) -> int:
    """Return how many of `room` bytes on the device are for what a step saves for backward (`saved` bytes).

    The rest is for weights. If both fit, both stay, and half of what is left is for longer rows. If not,
    `KEPT_OF_BOUND` of the share stays, and backward has to bring back what did not stay of either, so it
    hardly matters which. In forward, weights come in while saved tensors go out, both at the same time. What
    takes longer is the least if as many bytes of weights are away as of saved tensors:
    ``weights - (room - share) == saved - KEPT_OF_BOUND * share``. Each side gets a sixteenth of the room at
    least.
    """
    if weights + saved <= room:
        return saved + (room - weights - saved) // 2
    least = room // 16
    return min(saved, max(least, min(room - least, int((saved + room - weights) / (1 + KEPT_OF_BOUND)))))


def ram_limit() -> int:
    """Return the bytes of RAM that this process may use: the machine's, or less under a control group."""
    limits = (group.most() for group in _control_groups())
    return int(min((all_bytes(torch.device("cpu")), *limits)))


def all_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that this process may take; on the CPU, of the machine's RAM."""
    if device.type == "cpu":
        if not hasattr(os, "sysconf"):
            return _ram_of_windows().ullTotalPhys
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceMemory(device).total()


def free_bytes(device: torch.device) -> int:
    """Return the bytes that an install on a device could take.

    On an accelerator: what the driver has free plus what torch's allocator holds unused. On the CPU: what
    the system could give without swapping, within the limits of control groups. Raises ConfigError if that
    cannot be found out.
    """
    try:
        return _free_ram() if device.type == "cpu" else DeviceMemory(device).free()
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the free memory of '{device}' cannot be told here ({error}); give the budget in bytes"
        ) from error


def free_for_others(device: torch.device) -> int:
    """Return the bytes of a device's memory that other processes could take.

    Memory that torch's allocator holds unused is not among them.
    """
    return _free_ram() if device.type == "cpu" else DeviceMemory(device).free_for_others()


class _MemoryStatus(ctypes.Structure):
    """The structure MEMORYSTATUSEX of Windows, with the memory of the machine."""

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
    """Return the bytes of RAM that the limits of control groups leave; infinity without limits."""
    return min((group.free() for group in _control_groups()), default=math.inf)


def _control_groups() -> Iterator[_ControlGroup]:
    """Yield the control groups of this process that count memory, from the root to its own.

    Each of them may have a limit. In a container, the root is the container's own group, and folders of the
    other groups often do not exist: those have no limit.
    """
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
    #: The files with its limit and its use.
    limit: str
    used: str
    #: The fields of memory.stat that count cached pages of files.
    cached: tuple[str, str]

    def most(self) -> int | float:
        """Return the limit of the group in bytes; infinity without one."""
        try:
            limit = int((self.folder / self.limit).read_text())
        except (OSError, ValueError):  # "max" is no number
            return math.inf
        return limit if limit < _NO_LIMIT else math.inf

    def free(self) -> int | float:
        """Return the bytes that the limit of the group leaves; infinity without one."""
        limit = self.most()
        if limit == math.inf:
            return limit
        try:
            used = int((self.folder / self.used).read_text())
            counts = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            return math.inf
        return max(0, limit - used + sum(int(counts.get(field, 0)) for field in self.cached))
