"""Masters that are mapped from a file (pure-Python provider; native: csrc/platform/mapped_memory.h).

Note [Mapped files that become shorter]: if a file is truncated, the pages behind its new end are taken out of
all its mappings, and an access to such a page ends the process with SIGBUS. So this provider checks the
length of the file each time before it reads or hands out a mapped master. If the file is truncated in the
microseconds between the check and the read, or while the model computes with a master in place, the process
still ends. The native provider lets the kernel copy what it reads, so its reads are always safe.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Final

import torch

from dynswap_ext._util.file_mappings import FileMappings, Mapping
from dynswap_ext._util.memory import exact_bytes
from dynswap_ext._util.places import parts_of
from dynswap_ext.errors import SourceError

#: The attribute of a storage that has its address and the file mappings that were found there.
_KNOWN: Final = "_dynswap_files"


def mapped_files(master: torch.Tensor) -> tuple[Mapping, ...]:
    """Return the file mappings under a master's storage, except of files that were deleted or replaced."""
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
    """Return an error message if the files no longer have the `size` bytes at `address`, else ""."""
    for file in files:
        begin, end = max(address, file.begin), min(address + size, file.end)
        # The page where two parts of a fused weight meet is in the process's own memory, and does not need
        # the file (Note [A fused weight is a mapping]).
        spare = mmap.PAGESIZE - 1 if end < address + size else 0
        first, last = (place - file.begin + file.offset for place in (begin, end))
        if begin >= end:
            continue
        try:
            status = os.stat(file.name)
        except OSError:
            continue
        if status.st_ino != file.inode or last <= status.st_size + spare:
            continue  # it is long enough, or another file has its name by now
        return (
            f"a weight (bytes {first} to {last} of {file.name!r}) cannot be read: the file has been "
            f"truncated since it was mapped, and has {exact_bytes(status.st_size)} now; get a complete copy "
            "and load it again"
        )
    return ""


def check_mapped(master: torch.Tensor) -> None:
    """Raise SourceError if a master is mapped from a file that ends before the master does."""
    plain = type(master) in (torch.Tensor, torch.nn.Parameter)
    for part in (master,) if plain else parts_of(master):
        files = mapped_files(part)
        if files and part.numel() and (problem := what_is_missing(files, part.data_ptr(), span(part))):
            raise SourceError(problem)


def span(master: torch.Tensor) -> int:
    """Return how many bytes lie between the beginning of a tensor's first element and the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True))
    return (1 + last) * master.element_size() if master.numel() else 0
