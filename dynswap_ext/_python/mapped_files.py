"""Masters that are mapped from a file (pure-Python provider; native: csrc/io/mapped_memory.h).

Note [Mapped files that become shorter]: whoever truncates a file takes the pages behind its new end out of
all mappings of it, and the next access to one of them ends the process with SIGBUS. So the length of the file
is asked for each time before this provider reads or hands out a mapped master. A file that is truncated in
the microseconds between, or while the model computes with a master in place, still ends the process. The
native provider lets the kernel copy what it reads, and has no such moment.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dynswap_ext._util.file_mappings import FileMappings, Mapping
from dynswap_ext.errors import SourceError

__all__ = ["MappedFile", "check_mapped", "mapped_file", "span"]


class MappedFile(NamedTuple):
    """A file, and where in memory it is mapped."""

    mapping: Mapping

    def length(self) -> int | None:
        """Return the file's bytes now; None if its name is another file's by now, which is left alone."""
        try:
            status = os.stat(self.mapping.name)
        except OSError:
            return None
        return status.st_size if status.st_ino == self.mapping.inode else None

    def end(self, address: int, size: int) -> int:
        """Return the place in the file at which `size` bytes from `address` on end."""
        return address - self.mapping.begin + self.mapping.offset + size

    def has(self, address: int, size: int) -> bool:
        """Whether the file still has the bytes at `address`, as far as can be told."""
        length = self.length()
        return length is None or self.end(address, size) <= length


def mapped_file(master: torch.Tensor) -> MappedFile | None:
    """Return the file that a master is mapped from; None if there is none, or it has lost its name."""
    try:
        if master.device.type != "cpu" or master.layout is not torch.strided:
            return None
        storage = master.untyped_storage()
        if storage.resizable():
            return None  # memory of torch's allocator
        key, address = storage._cdata, storage.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return None  # it has no memory of its own, or none yet (lazy modules)
    known = _files.get(key)
    if known is not None and known[1] == address and not known[0].expired():  # type: ignore[no-untyped-call]
        return known[2]
    for other, (guard, _, _) in list(_files.items()):
        if guard.expired():  # type: ignore[no-untyped-call]
            _files.pop(other, None)
    mapping = FileMappings().find(address)
    file = None if mapping is None or mapping.path is None else MappedFile(mapping)
    _files[key] = StorageWeakRef(storage), address, file  # type: ignore[no-untyped-call]
    return file


def check_mapped(master: torch.Tensor) -> None:
    """Ask whether a master that is mapped from a file can be read.

    Raises
    ------
    SourceError
        The file ends before the master does. Names the file, its length, and what the master needs.
    """
    file = mapped_file(master)
    if file is None or master.numel() == 0:
        return
    size, length = span(master), file.length()
    end = file.end(master.data_ptr(), size)
    if length is not None and end > length:
        raise SourceError(
            f"a weight (bytes {end - size} to {end} of {file.mapping.name!r}) cannot be read: the file "
            f"has been truncated since it was mapped, and has {length} bytes now; get a complete copy "
            "and load it again"
        )


def span(master: torch.Tensor) -> int:
    """Return how many bytes the tensor's elements span."""
    last = sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True))
    return (1 + last) * master.element_size() if master.numel() else 0


#: By the address of a storage, which the weak reference keeps from being given to another one.
_files: dict[int, tuple[StorageWeakRef, int, MappedFile | None]] = {}
