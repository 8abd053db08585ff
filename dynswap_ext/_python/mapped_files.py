"""Masters that are mapped from a file (pure-Python provider; native: csrc/platform/mapped_memory.h).

Note [Mapped files that become shorter]: whoever truncates a file takes the pages behind its new end out of
all mappings of it, and the next access to one of them ends the process with SIGBUS. So the length of the file
is asked for each time before this provider reads or hands out a mapped master. A file that is truncated in
the microseconds between, or while the model computes with a master in place, still ends the process. The
native provider lets the kernel copy what it reads, and has no such moment.
"""

from __future__ import annotations

import os

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dynswap_ext._util.file_mappings import FileMappings, Mapping
from dynswap_ext.errors import SourceError

#: By the address of a storage, which the weak reference keeps from being given to another one.
_files: dict[int, tuple[StorageWeakRef, int, Mapping | None]] = {}


def mapped_file(master: torch.Tensor) -> Mapping | None:
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
    file = FileMappings().find(address)
    if file is not None and file.path is None:
        file = None
    _files[key] = StorageWeakRef(storage), address, file  # type: ignore[no-untyped-call]
    return file


def what_is_missing(file: Mapping, address: int, size: int) -> str:
    """Say why the file no longer has `size` bytes at `address`; empty if it has, as far as can be told."""
    end = address - file.begin + file.offset + size
    try:
        status = os.stat(file.name)
    except OSError:
        return ""
    if status.st_ino != file.inode or end <= status.st_size:
        return ""  # its name may be another file's by now, and it is left alone
    return (
        f"a weight (bytes {end - size} to {end} of {file.name!r}) cannot be read: the file has been "
        f"truncated since it was mapped, and has {status.st_size} bytes now; get a complete copy and load it "
        "again"
    )


def check_mapped(master: torch.Tensor) -> None:
    """Raise SourceError if a master is mapped from a file that ends before the master does."""
    file = mapped_file(master)
    if file is not None and master.numel():
        problem = what_is_missing(file, master.data_ptr(), span(master))
        if problem:
            raise SourceError(problem)


def span(master: torch.Tensor) -> int:
    """Return how many bytes the tensor's elements span."""
    last = sum((size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True))
    return (1 + last) * master.element_size() if master.numel() else 0
