"""Rates of a machine, given or measured, and the compute times of a model's weights that follow from them."""

from __future__ import annotations

import math
import mmap
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext._util.clock import DeviceClock
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.units import parse_bandwidth, parse_seconds, parse_throughput
from dynswap_ext.checkpoint.options import check_dtype
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.weights import PlannedWeight

_MOST_ROWS: Final = 1 << 40
#: Threads that read in a disk measurement: a single one leaves the queue of a fast disk empty between reads.
_READERS: Final = 4
_BLOCK: Final = 16 << 20
#: Bytes that are read, or moved by copies, to measure a bandwidth.
_SAMPLE: Final = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Rates of a device and of the bus to it: bandwidth, arithmetic, memory, latency."""

    #: The name of the device, in words.
    name: str
    #: Bytes per second from masters to the device.
    bandwidth: float
    #: Floating-point operations per second in matrix products.
    arithmetic: float
    #: Bytes per second of the device's own memory.
    memory: float
    #: Seconds to begin a copy.
    latency: float = 7e-6
    #: How the bandwidth was measured, in words; empty if it was not.
    bandwidth_kind: str = ""

    def with_rates(
        self,
        *,
        bandwidth: str | None = None,
        arithmetic: str | None = None,
        memory: str | None = None,
        latency: str | None = None,
    ) -> Machine:
        """Return the machine with other rates, written as "25GB/s", "120TFLOPS", "900GB/s" and "7us".

        Raises
        ------
        ConfigError
            A rate cannot be read.
        """
        return replace(
            self,
            bandwidth=parse_bandwidth(bandwidth) if bandwidth else self.bandwidth,
            arithmetic=parse_throughput(arithmetic) if arithmetic else self.arithmetic,
            memory=parse_bandwidth(memory) if memory else self.memory,
            latency=parse_seconds(latency) if latency else self.latency,
        )


#: The machine that is assumed where rates are neither given nor measured. benchmarks/virtual_clock.py has the
#: same rates.
ASSUMED: Final = Machine("a PCIe 4 card", bandwidth=26e9, arithmetic=120e12, memory=0.9e12)


def timed(weights: Sequence[PlannedWeight], machine: Machine, *, rows: int = 1) -> tuple[PlannedWeight, ...]:
    """Return the weights with their compute times, from the rates of a machine.

    A matrix takes 2 operations for each element and row, or the time to read it if that is longer. (A matrix
    for a time step is multiplied by one row only.) A norm reads and writes its rows. A table that rows are
    looked up in takes no time. Attention products and activations are not counted.

    Parameters
    ----------
    weights
        The weights in the order of use.
    machine
        Its `arithmetic` and `memory` are used.
    rows
        The number of vectors that a pass multiplies by each matrix: tokens, times the batch.

    Raises
    ------
    ConfigError
        `rows` is less than 1, or a rate is not above zero.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"rows is {rows!r}; expected the number of rows of a pass, 1 or more")
    for name, rate in (("arithmetic", machine.arithmetic), ("memory", machine.memory)):
        if not 0 < rate < math.inf:
            raise ConfigError(f"{name} of the machine is {rate!r}; expected a rate a second, above zero")
    return tuple(
        replace(
            weight,
            seconds=_seconds(weight, machine, rows),
            # Each row chooses experts by itself: the part of them that at least one row chooses.
            by_use=weight.by_use and 1 - (1 - weight.share) ** rows,
        )
        for weight in weights
    )


def spread(weights: Sequence[PlannedWeight], seconds: float) -> tuple[PlannedWeight, ...]:
    """Return the weights, with the compute time of a pass divided among them by their operations.

    If none of them is a matrix, it is divided by their bytes.

    Raises
    ------
    ConfigError
        `seconds` is negative or not finite.
    """
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"the compute of a pass is {seconds!r}; expected seconds, 0 or more")
    parts = [weight.elements * weight.share if weight.kind == "matrix" else 0.0 for weight in weights]
    if not any(parts):
        parts = [float(weight.nbytes) for weight in weights]
    whole = math.fsum(parts)
    return tuple(
        replace(weight, seconds=seconds * part / whole) for weight, part in zip(weights, parts, strict=True)
    )


def rows_to_hide(weights: Sequence[PlannedWeight], machine: Machine, seconds: float) -> int | None:
    """Return the fewest rows with which a pass computes for `seconds`, so that it hides copies of that time.

    None if no number of rows is enough.
    """

    def computes(rows: int) -> float:
        return math.fsum(_seconds(weight, machine, rows) for weight in weights)

    rows = bisect_left(range(_MOST_ROWS), seconds, lo=1, key=computes)
    return rows if rows < _MOST_ROWS else None


def _seconds(weight: PlannedWeight, machine: Machine, rows: int) -> float:
    if weight.kind == "lookup":
        return 0.0
    rows_seen = 1.0 if weight.kind == "once" else rows * weight.share
    read = weight.nbytes * min(1.0, rows_seen) / machine.memory
    if weight.kind in ("matrix", "once"):
        return max(2.0 * weight.elements * rows_seen / machine.arithmetic, read)
    return read + (2.0 * rows_seen * weight.nbytes / machine.memory if weight.kind == "norm" else 0.0)


# ---- measured here -----------------------------------------------------------------------------------------


def latency_of(device: torch.device) -> float:
    """Return the assumed seconds to begin a copy: on the CPU a read of a disk, else a call of the driver."""
    return 1e-4 if device.type == "cpu" else 7e-6


def measure_machine(
    device: torch.device | str | int, *, dtype: torch.dtype | None = None, file: Path | None = None
) -> Machine:
    """Measure the bandwidth, arithmetic and memory of a device. It takes some seconds.

    Parameters
    ----------
    device
        The option of `install`.
    dtype
        The dtype of the matrix products. Default: bfloat16 on an accelerator, float32 on the CPU.
    file
        For the CPU: the file from which masters are mapped. Without one, the bandwidth is that of memory.

    Raises
    ------
    ConfigError
        There is no such device, or the dtype cannot be used.
    """
    where = resolve_device(device)
    check_dtype(dtype)
    side, kind = (1024, torch.float32) if where.type == "cpu" else (8192, torch.bfloat16)
    left, right = (torch.randn(side, side, device=where).to(dtype or kind) for _ in range(2))
    bandwidth, how, _ = masters_bandwidth(where, [] if file is None else [file])
    return Machine(
        name=device_name(where),
        bandwidth=bandwidth,
        arithmetic=2 * side**3 / min(_times(lambda: left @ right, where)),
        memory=2 * _copy_bandwidth(where),  # a copy reads and writes
        latency=latency_of(where),
        bandwidth_kind=how,
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device with its model, or for the CPU with the number of torch's threads."""
    if device.type == "cpu":
        return f"{device} ({torch.get_num_threads()} threads)"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"


def masters_bandwidth(device: torch.device, files: Sequence[Path]) -> tuple[float, str, tuple[str, ...]]:
    """Return the bandwidth of copies to a device in bytes/s, how it was measured, and notes for the user."""
    if device.type != "cpu":
        return (*_host_bandwidth(device), ())
    if files:
        largest = max(files, key=lambda file: file.stat().st_size)
        rate = disk_bandwidth(largest, readers=_READERS, limit=_SAMPLE)
        return rate, f"direct reads of {largest.name}, {_READERS} at a time", ()
    note = (
        "Masters are not mapped from a file, and the device is the CPU: copies are taken to be those of "
        "memory. A checkpoint opened with checkpoint.load streams from its disk."
    )
    return _copy_bandwidth(device), "copies in memory", (note,)


def pinned_bandwidth(device: torch.device) -> float:
    """Return the bytes/s of copies to the device from pinned memory, or from ordinary memory without that."""
    return _host_bandwidth(device)[0]


def _host_bandwidth(device: torch.device) -> tuple[float, str]:
    """Return the bytes/s of copies from pinned or else ordinary memory, and which of them it is, in words."""
    source = torch.empty(256 << 20, dtype=torch.uint8)
    how = "copies from pinned memory"
    try:
        source = source.pin_memory()
    except (NotImplementedError, RuntimeError):
        how = f"copies from ordinary memory, as torch pins none for '{device.type}'"
    target = torch.empty_like(source, device=device)
    seconds = statistics.median(_times(lambda: target.copy_(source, non_blocking=True), device))
    return source.nbytes / seconds, how


def disk_bandwidth(path: Path, *, readers: int = 1, limit: int | None = None) -> float:
    """Return the bytes/s of reading a file, or its first `limit` bytes, past the page cache where possible.

    Cached pages of the file are dropped first. A number of `readers`, which are threads, take blocks of
    16 MiB in turn. A single one does what ``dd iflag=direct bs=16M`` does.
    """
    drop_file_cache(path)
    size = min(path.stat().st_size, limit or sys.maxsize)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without O_DIRECT
        descriptor = os.open(path, os.O_RDONLY)

    def read(reader: int) -> int:
        with mmap.mmap(-1, _BLOCK) as buffer:  # begins at a page, which O_DIRECT asks for
            offsets = range(reader * _BLOCK, size, readers * _BLOCK)
            return sum(os.preadv(descriptor, [buffer], offset) for offset in offsets)

    try:
        with ThreadPoolExecutor(readers) as pool:
            begin = time.perf_counter()
            total = sum(pool.map(read, range(readers)))
            return total / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)


def _copy_bandwidth(device: torch.device) -> float:
    """Return the bytes/s that are copied from one place in the device's memory to another."""
    block = torch.empty(_SAMPLE // 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    return block.nbytes / min(_times(lambda: target.copy_(block), device))


def _times(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Return the seconds of each of seven calls, which follow two that do not count."""
    clock, seconds = DeviceClock(device), []
    for _ in range(9):
        begin = clock.mark()
        call()
        seconds.append(clock.seconds(begin, clock.mark()))
    return seconds[2:]
