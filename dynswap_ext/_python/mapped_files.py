"""Masters that are mapped from a file (pure-Python provider; native: csrc/platform/mapped_memory.h).

Note [Mapped files that become shorter]: whoever truncates a file takes the pages behind its new end out of
all mappings of it, and the next access to one of them ends the process with SIGBUS. So the length of the file
is asked for each time before this provider reads or hands out a mapped master. A file that is truncated in
the microseconds between, or while the model computes with a master in place, still ends the process. The
native provider lets the kernel copy what it reads, and has no such moment.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Final

import torch

from dynswap_ext._util.file_mappings import FileMappings, Mapping
from dynswap_ext._util.memory import exact_bytes
from dynswap_ext.errors import SourceError

#: Under which name a storage has what is known of the files under it, and the address for which that is so.
_KNOWN: Final = "_dynswap_files"


def mapped_files(master: torch.Tensor) -> tuple[Mapping, ...]:
    """Return the file mappings under a master's storage, except those of files that have lost their names."""
    try:
        if master.device.type != "cpu" or master.layout is not torch.strided:
            return ()
        storage = master.untyped_storage()
        if storage.resizable():
            return ()  # memory of torch's allocator
        address = storage.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return ()  # it has no memory of its own, or none yet (lazy modules)
    known: tuple[int, tuple[Mapping, ...]] | None = vars(storage).get(_KNOWN)
    if known is None or known[0] != address:
        mapped = FileMappings().overlapping(address, max(storage.nbytes(), 1))
        known = address, tuple(file for file in mapped if file.path is not None)
        vars(storage)[_KNOWN] = known  # torch keeps the object for as long as the storage is alive
    return known[1]


def what_is_missing(files: Iterable[Mapping], address: int, size: int) -> str:
    """Say why files no longer have the `size` bytes at `address`; empty if they have, as far as is known."""
    for file in files:
        begin, end = max(address, file.begin), min(address + size, file.end)
        # The page at a joint is this process's own, whatever the file has there (Note [A fused weight is a
        # mapping]).
        spare = mmap.PAGESIZE - 1 if end < address + size else 0
        first, last = (place - file.begin + file.offset for place in (begin, end))
        if begin >= end:
            continue
        try:
            status = os.stat(file.name)
        except OSError:
            continue
        if status.st_ino != file.inode or last <= status.st_size + spare:
            continue  # its name may be another file's by now, and it is left alone
        return (
            f"a weight (bytes {first} to {last} of {file.name!r}) cannot be read: the file has been "
            f"truncated since it was mapped, and has {exact_bytes(status.st_size)} now; get a complete copy "
            "and load it again"
        )
    return ""


def check_mapped(master: torch.Tensor) -> None:
    """Raise SourceError if a master is mapped from a file that ends before the master does."""
    files = mapped_files(master)
    if files and master.numel():
        problem = what_is_missing(files, master.data_ptr(), span(master))
        if problem:
            raise SourceError(problem)


def span(master: torch.Tensor) -> int:
    """Return how many bytes the tensor's elements span."""
    last = sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True))
    return (1 + last) * master.element_size() if master.numel() else 0
