"""Maps files, which may be larger than RAM, and explains what to do if the system refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext.checkpoint.formats.common import AGAIN
from dynswap_ext.errors import SourceError


def map_file(path: Path, descriptor: int, size: int) -> torch.UntypedStorage:
    """Map the open file's first `size` bytes copy-on-write, without reading them or reserving memory.

    Maps the file of the descriptor, whose header was read, even if `path` names another file by now. The
    storage unmaps the bytes when it dies.

    Raises
    ------
    SourceError
        The file has become shorter than `size`, or the system refuses the mapping. Then the message names the
        limit that was met, and how to raise it.
    """
    with _refusals(path, size):
        storage = _mapped(descriptor, size)
    if (now := os.fstat(descriptor).st_size) < size:
        raise SourceError(
            f"{path} cannot be mapped: it had {exact_bytes(size)} and has {exact_bytes(now)} now; {AGAIN}, "
            "and load when nothing writes to it"
        )
    return storage


def reserve(size: int) -> torch.Tensor:
    """Return `size` zero bytes that take only address space until they are written to, for `map_in_place`."""
    with _refusals(Path("a weight of several parts"), size):
        return torch.frombuffer(_memory(-1, size, _FLAGS | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def map_in_place(path: Path, descriptor: int, offset: int, address: int, size: int) -> None:
    """Map `size` bytes of an open file, from `offset` on, copy-on-write to an address in memory of `reserve`.

    `offset` and `address` are multiples of the page size. SourceError if the system refuses.
    """
    with _refusals(path, size):
        _mmap(address, size, _FLAGS | _MAP_FIXED, descriptor, offset)


@contextmanager
def read_by_page(memory: torch.Tensor) -> Iterator[None]:
    """Make a context in which touching a page of mapped memory reads that page alone, and none ahead."""
    where = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    _LIBC.madvise(*where, mmap.MADV_RANDOM)
    try:
        yield
    finally:
        _LIBC.madvise(*where, mmap.MADV_NORMAL)


@contextmanager
def _refusals(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"{path} cannot be mapped: the system refuses {format_bytes(size)} of address space"
        if error.errno == errno.ENOMEM or getattr(error, "winerror", None) == _COMMITMENT_LIMIT:
            advice = f", {_limit_met(size)}. Nothing is wrong with the file, and it need not fit in RAM"
        else:
            advice = f" ({error.strerror}); copy it to a file system whose files can be mapped"
        raise SourceError(what + advice) from error


# Note [Mapped without a reservation]: Linux counts a private, writable mapping as memory that the process may
# need in full, and refuses one that is larger than RAM and swap together (with vm.overcommit_memory=0, the
# default). Hardly any page of a checkpoint is ever written to, so files are mapped with MAP_NORESERVE, and
# are not counted. Torch's own mappings (UntypedStorage.from_file, torch.load) do not let us choose the flags,
# and a `mmap.mmap` keeps a descriptor open as long as it lives. So mmap(2) is called through ctypes. Windows
# counts every mapping that may be written to, and has no flag against that.

_HAS_FLAGS = hasattr(mmap, "MAP_PRIVATE")
_COMMITMENT_LIMIT = 1455  # ERROR_COMMITMENT_LIMIT of Windows: RAM and page file are promised to others

if _HAS_FLAGS:
    _FLAGS = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 lacks the name
    _MAP_FIXED = 0x10  # Python lacks the name
    _LIBC = ctypes.CDLL(None, use_errno=True)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    _LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mapped(descriptor: int, size: int) -> torch.UntypedStorage:
    if not _HAS_FLAGS:
        copied_on_write = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        return torch.frombuffer(copied_on_write, dtype=torch.uint8).untyped_storage()
    return torch.frombuffer(_memory(descriptor, size, _FLAGS), dtype=torch.uint8).untyped_storage()


def _memory(descriptor: int, size: int, flags: int) -> ctypes.Array[ctypes.c_char]:
    """Map an open file, or anonymous memory for a descriptor of -1. The array unmaps it when it dies."""
    address = _mmap(None, size, flags, descriptor, 0)
    memory = (ctypes.c_char * size).from_address(address)
    # Tensors may still be read during the exit.
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return memory


def _mmap(address: int | None, size: int, flags: int, descriptor: int, offset: int) -> int:
    mapped: int = _LIBC.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _limit_met(size: int) -> str:
    """Return a text that says which limit of the system a mapping has met, and how to raise it."""
    if not _HAS_FLAGS:
        return (
            "as Windows counts all that is mapped as memory in use: enlarge its page file until RAM and page "
            "file together hold the whole file"
        )
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = int((_read("/proc/self/statm") or "0").split()[0]) * mmap.PAGESIZE
    if limit != resource.RLIM_INFINITY and used + size > limit:
        return (
            f"as this process may have {format_bytes(limit)} in all and has {format_bytes(used)}: raise its "
            "limit (`ulimit -v unlimited` in the shell that starts it, RLIMIT_AS elsewhere)"
        )
    if _read("/proc/sys/vm/overcommit_memory") == "2":
        return (
            "as vm.overcommit_memory is 2, which counts all that is mapped as memory in use: set it to 0 "
            "(`sudo sysctl vm.overcommit_memory=0`), or add swap until the whole file fits"
        )
    return (
        "as this process has as many mappings as vm.max_map_count allows "
        f"({_read('/proc/sys/vm/max_map_count') or 'unknown'}), or for lack of memory: raise that limit "
        "(`sudo sysctl vm.max_map_count=1048576`), and check how much memory this process may use "
        "(`ulimit -a`, the container's limit)"
    )


def _read(path: str) -> str:
    """Return the content of a file in /proc; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
