"""The fastest that the disk can be read, with any number of readers."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

from dynswap_ext._util.file_mappings import drop_file_cache

_BLOCK = 4 << 20
_AT_LEAST = 256 << 20  # bytes for one figure: a small file is read several times
_READERS = (1, 4, 16)


def most_bytes_a_second(path: Path) -> float:
    """Return the highest rate, in bytes per second, at which a file is read without the page cache."""
    return max(_rate(path, readers) for readers in _READERS)


def _rate(path: Path, readers: int) -> float:
    drop_file_cache(path)
    size = path.stat().st_size
    blocks = -(-size // _BLOCK)
    times = max(1, min(16, _AT_LEAST // size))
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without it
        descriptor = os.open(path, os.O_RDONLY)
    lock, barrier = threading.Lock(), threading.Barrier(readers + 1)
    place, total = 0, 0

    def read() -> None:
        nonlocal place, total
        with mmap.mmap(-1, _BLOCK) as buffer:  # anonymous memory begins at a page, as O_DIRECT asks
            buffer.write(bytes(_BLOCK))  # its pages are there before the clock starts
            barrier.wait()
            while True:
                with lock:
                    block, place = place, place + 1
                if block >= blocks * times:
                    return
                got = os.preadv(descriptor, [buffer], block % blocks * _BLOCK)
                with lock:
                    total += got

    threads = [threading.Thread(target=read) for _ in range(readers)]
    try:
        for thread in threads:
            thread.start()
        barrier.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        return total / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
