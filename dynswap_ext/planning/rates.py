"""How fast this machine is: from masters to the device, in arithmetic, in the device's memory."""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext import config
from dynswap_ext._util.clock import DeviceClock
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext.planning.machine import Machine

#: Threads of a disk measurement: one alone leaves the queue of a fast disk empty between its reads.
_READERS: Final = 4
_BLOCK: Final = 16 << 20
#: Bytes that are read or copied to know a bandwidth.
_SAMPLE: Final = 1 << 30


def latency_of(device: torch.device) -> float:
    """Return the seconds to begin a copy: a read of a disk, or a call of the CUDA runtime. Not measured."""
    return 1e-4 if device.type == "cpu" else 7e-6


def measure_machine(
    device: torch.device | str | int, *, dtype: torch.dtype | None = None, file: Path | None = None
) -> Machine:
    """Measure bandwidth, arithmetic and memory of a device, in some seconds.

    Parameters
    ----------
    device
        As for `install`.
    dtype
        Of the matrix products; default: bfloat16 on an accelerator, float32 on the CPU.
    file
        For the CPU: what masters are mapped from. Without one, the bandwidth is that of memory.

    Raises
    ------
    ConfigError
        There is no such device.
    """
    where = config.resolve(device=device).device
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
    """Return a device's name, with its model or the number of threads."""
    threads = f"{torch.get_num_threads()} threads"
    return f"{device} ({torch.cuda.get_device_name(device) if device.type == 'cuda' else threads})"


def masters_bandwidth(device: torch.device, files: Sequence[Path]) -> tuple[float, str, tuple[str, ...]]:
    """Return the bandwidth of copies to a device in bytes/s, how it was measured, and notes for the user."""
    if device.type == "cuda":
        return pinned_bandwidth(device), "copies from pinned memory", ()
    if files:
        largest = max(files, key=lambda file: file.stat().st_size)
        rate = disk_bandwidth(largest, readers=_READERS, limit=_SAMPLE)
        return rate, f"direct reads of {largest.name}, {_READERS} at a time", ()
    note = (
        "Masters are not mapped from a file, and the device is the CPU: copies are taken to be those of "
        "memory. A checkpoint opened with checkpoint.load streams from its disk."
    )
    return _copy_bandwidth(device), "copies in memory", (note,)


def pinned_bandwidth(device: torch.device, *, size: int = 256 << 20) -> float:
    """Return the bytes/s of copies from pinned memory to the device."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / statistics.median(_times(lambda: target.copy_(source, non_blocking=True), device))


def disk_bandwidth(path: Path, *, readers: int = 1, limit: int | None = None) -> float:
    """Return the bytes/s of reading a file from its beginning, past the page cache where that is possible.

    Parameters
    ----------
    path
        The file; its cached pages are dropped first.
    readers
        Threads that take blocks of 16 MiB in turn. One is what ``dd iflag=direct bs=16M`` does.
    limit
        Bytes to read, at most; None is the whole file.
    """
    drop_file_cache(path)
    size = min(path.stat().st_size, limit or sys.maxsize)
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without it
        descriptor = os.open(path, os.O_RDONLY)

    def read(reader: int) -> int:
        with mmap.mmap(-1, _BLOCK) as buffer:  # anonymous memory begins at a page, as O_DIRECT asks
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


def _times(call: Callable[[], Any], device: torch.device, warm_up: int = 2, repeats: int = 7) -> list[float]:
    """Return the seconds of each of some calls, after calls that are not timed."""
    clock, seconds = DeviceClock(device), []
    for _ in range(warm_up + repeats):
        begin = clock.mark()
        call()
        seconds.append(clock.seconds(begin, clock.mark()))
    return seconds[warm_up:]
