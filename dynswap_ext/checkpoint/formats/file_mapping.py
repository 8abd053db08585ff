"""Maps files, which may be larger than RAM, and explains what to do if the system refuses."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from dynswap_ext._util.memory import format_bytes
from dynswap_ext.checkpoint.formats.common import AGAIN
from dynswap_ext.errors import SourceError

__all__ = ["map_file", "refused"]


def map_file(path: Path, descriptor: int, size: int) -> torch.UntypedStorage:
    """Map the open file's first `size` bytes copy-on-write, without reading them or reserving memory.

    Maps by the descriptor, not by `path`: this is the file whose header was read, even if another one has
    its name by now. The storage unmaps the bytes when it dies.

    Raises
    ------
    SourceError
        The file has become shorter than `size`, or the system refuses the mapping; names the limit that was
        met, and how to raise it.
    """
    try:
        storage = _mapped(path, descriptor, size)
    except (OSError, RuntimeError) as error:
        raise refused(path, size, error) from error
    if (now := os.fstat(descriptor).st_size) < size:
        raise SourceError(
            f"{path} cannot be mapped: it had {size:,} bytes and has {now:,} now; {AGAIN}, and load when "
            "nothing writes to it"
        )
    return storage


# Note [Mapped without a reservation]: Linux counts a private, writable mapping as memory that the process may
# need in full, and refuses one that is larger than RAM and swap together (with vm.overcommit_memory=0, the
# default). Hardly a page of a checkpoint is ever written to, so it is mapped with MAP_NORESERVE, which is not
# counted. Torch's own mappings (UntypedStorage.from_file, torch.load) do not let the flags be chosen, and a
# `mmap.mmap` keeps a descriptor open for as long as it lives. Hence mmap(2) by ctypes.


def _mapped(path: Path, descriptor: int, size: int) -> torch.UntypedStorage:
    if sys.platform == "win32":
        return cast("torch.UntypedStorage", torch.UntypedStorage.from_file(str(path), False, size))
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it
    map_it, unmap = _system_calls()
    address = map_it(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, unmap, address, size).atexit = False  # tensors may still be read during the exit
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


@functools.cache
def _system_calls() -> tuple[Callable[..., Any], Callable[..., Any]]:
    libc = ctypes.CDLL(None, use_errno=True)
    address, length, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, length, integer, integer, integer, ctypes.c_long)
    libc.munmap.argtypes = (address, length)
    return libc.mmap, libc.munmap


# ---- refusals ----------------------------------------------------------------------------------------------


def refused(path: Path, size: int, error: Exception) -> SourceError:
    """Return the error for a mapping of a whole file that the system has refused."""
    what = f"{path} cannot be mapped: the system refuses {format_bytes(size)} of address space"
    if not isinstance(error, OSError) or error.errno != errno.ENOMEM:
        reason = error.strerror if isinstance(error, OSError) else error
        return SourceError(f"{what} ({reason}); copy it to a file system whose files can be mapped")
    return SourceError(
        f"{what}, {_limit_met(size)}. Nothing is wrong with the file, and it need not fit in RAM"
    )


def _limit_met(size: int) -> str:
    """Say which limit of the system a mapping has met, and how to raise it."""
    limit, used = _address_space()
    if limit is not None and used + size > limit:
        return (
            f"as this process may have {format_bytes(limit)} in all and has {format_bytes(used)}: raise its "
            "limit (`ulimit -v unlimited` in the shell that starts it, RLIMIT_AS elsewhere)"
        )
    if _setting("overcommit_memory") == "2":
        return (
            "as vm.overcommit_memory is 2, which counts all that is mapped as memory in use: set it to 0 "
            "(`sudo sysctl vm.overcommit_memory=0`), or add swap until the whole file fits"
        )
    return (
        f"as this process has as many mappings as vm.max_map_count allows ({_setting('max_map_count')}), or "
        "for lack of memory: raise that limit (`sudo sysctl vm.max_map_count=1048576`), and check how much "
        "memory this process may use (`ulimit -a`, the container's limit)"
    )


def _address_space() -> tuple[int | None, int]:
    """Return how many bytes of address space this process may have (None: any number), and has."""
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        used = 0
    return (None if limit == resource.RLIM_INFINITY else limit), used


def _setting(name: str) -> str:
    """Return a setting of the system's virtual memory, or "unknown"."""
    try:
        return Path("/proc/sys/vm", name).read_text().strip()
    except OSError:
        return "unknown"
