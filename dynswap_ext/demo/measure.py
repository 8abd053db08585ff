"""What the machine does, measured: memory, disk reads, bandwidths. None where a system does not tell."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

from dynswap_ext._mappings import mappings

_BLOCK = 16 << 20
_MADV_DONTNEED = 4


class MemoryMeter:
    """Growth of this process's resident memory from here to its highest point.

    On Linux the kernel's high-water mark is set back at the start, so that no sampling is involved.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._start: int | None = None
        else:
            self._start = _status_bytes("VmRSS")

    def peak_growth(self) -> int | None:
        """Bytes between the start and the highest point since; None where it cannot be measured."""
        highest = _status_bytes("VmHWM")
        return None if self._start is None or highest is None else max(0, highest - self._start)


def resident_bytes() -> int | None:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def _status_bytes(key: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def disk_bytes_read() -> int | None:
    """Bytes that storage has delivered to this process so far, page faults and threads included."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:")), None)


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Address and length of each of this process's mappings of a file."""
    wanted = str(path.resolve())
    return [(mapping.begin, mapping.end - mapping.begin) for mapping in mappings() if mapping.name == wanted]


def drop_file_cache(path: Path) -> None:
    """Let go of a file's pages in this process's mappings and in the page cache.

    Only for files that nobody has written to through a private mapping: such pages would be lost.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for start, length in mapped_ranges(path):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def disk_bandwidth(path: Path, *, readers: int = 1, limit: int | None = None) -> float:
    """Bytes a second of reading a file from its beginning, around the page cache where that is possible.

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
    descriptor = _open_direct(path)
    lock, position = threading.Lock(), 0
    total = 0

    def read() -> None:
        nonlocal position, total
        with mmap.mmap(-1, _BLOCK) as buffer:  # anonymous memory begins at a page, as O_DIRECT asks
            while True:
                with lock:
                    offset = position
                    position += _BLOCK
                if offset >= size:
                    return
                got = os.preadv(descriptor, [buffer], offset)
                with lock:
                    total += got

    threads = [threading.Thread(target=read) for _ in range(readers)]
    try:
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
    finally:
        os.close(descriptor)
    return total / seconds


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without it
        return os.open(path, os.O_RDONLY)


def pinned_bandwidth(device: torch.device, *, size: int = 256 << 20, repeats: int = 10) -> float:
    """Bytes a second of copies from pinned memory to the device, the median of several."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds: list[float] = []
    for _ in range(repeats + 2):
        begin, end = timing_event(), timing_event()
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return size / statistics.median(seconds[2:])


def timing_event() -> torch.cuda.Event:
    """An event that elapsed_time() accepts."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
