"""Whether somebody has written to a master's bytes (pure-Python provider; native: csrc/io/memory_watch.h).

`p.data[i] = x`, NumPy, DLPack and fused optimizers bump no version counter. The kernel knows the pages that
were written, since Linux 6.7: they are registered with a userfaultfd and write-protected; the first write to
one lifts its protection, and PAGEMAP_SCAN finds those and protects them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import threading
import weakref
from typing import Any, Final

import torch

__all__ = ["MemoryWatch", "watches_pages"]

#: From here on the kernel is asked; what is smaller, and the pages that a master shares, is compared.
_WATCHED: Final = 32 << 10
#: Where it does not answer, what is larger than this is compared in a few places only.
_COMPARED: Final = 64 << 10
_PAGE: Final = mmap.PAGESIZE

# <linux/userfaultfd.h>, <linux/fs.h>
_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY: Final = 1
_UFFD_API: Final = 0xAA
_WP_UNPOPULATED: Final = 1 << 13
_WP_ASYNC: Final = 1 << 15
_UFFDIO_API: Final = 0xC018AA3F
_UFFDIO_REGISTER: Final = 0xC020AA00
_UFFDIO_UNREGISTER: Final = 0x8010AA01
_UFFDIO_WRITEPROTECT: Final = 0xC018AA06
_MODE_WP: Final = 2
_PAGEMAP_SCAN: Final = 0xC0606610
_SCAN_PROTECT: Final = 1
_SCAN_FAIL_IF_UNREGISTERED: Final = 2
_WRITTEN: Final = 2
_REGIONS: Final = 64


class _Kernel:
    """The userfaultfd of the process, and what is watched through it. Thread-safe."""

    def __init__(self) -> None:
        import fcntl

        self._ioctl = fcntl.ioctl
        #: Reentrant: a watch may end, in a garbage collection, wherever one is looked at.
        self.lock = threading.RLock()
        # LOCK: guards both below.
        self.watches: weakref.WeakSet[_Pages] = weakref.WeakSet()
        self._uffd = ctypes.CDLL(None, use_errno=True).syscall(
            _SYSCALL[platform.machine()], os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        )
        if self._uffd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self._control(_UFFDIO_API, _UFFD_API, _WP_ASYNC | _WP_UNPOPULATED, 0)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        page = mmap.mmap(-1, _PAGE)  # the kernel may know no PAGEMAP_SCAN
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self.register(address, address + _PAGE)
        self.look(address, address + _PAGE)

    def close(self) -> None:
        for descriptor in (self._uffd, self._pagemap):
            os.close(descriptor)

    def _control(self, request: int, *words: int) -> None:
        self._ioctl(self._uffd, request, bytearray(struct.pack(f"{len(words)}Q", *words)), True)

    def register(self, begin: int, end: int) -> None:
        self._control(_UFFDIO_REGISTER, begin, end - begin, _MODE_WP, 0)

    def unregister(self, begin: int, end: int) -> None:
        self._control(_UFFDIO_UNREGISTER, begin, end - begin)

    def lift(self, begin: int, end: int) -> None:
        self._control(_UFFDIO_WRITEPROTECT, begin, end - begin, 0)

    def look(self, begin: int, end: int) -> None:
        """Count what was written, for all that watch it, and protect it again."""
        size = struct.calcsize("12Q")
        regions = (ctypes.c_uint64 * (3 * _REGIONS))()
        while begin < end:
            scan = bytearray(
                struct.pack(
                    "12Q",
                    *(size, _SCAN_PROTECT | _SCAN_FAIL_IF_UNREGISTERED, begin, end, 0),
                    *(ctypes.addressof(regions), _REGIONS, 0),
                    *(0, _WRITTEN, 0, _WRITTEN),
                )
            )
            found = self._ioctl(self._pagemap, _PAGEMAP_SCAN, scan, True)
            for i in range(found):
                first, last = regions[3 * i], regions[3 * i + 1]
                for watch in self.watches:
                    if first < watch.end and watch.begin < last:
                        watch.writes += 1
            begin = struct.unpack_from("Q", scan, 32)[0]


class _Pages:
    """Whole pages that the kernel watches."""

    def __init__(self, kernel: _Kernel, begin: int, end: int) -> None:
        self.begin, self.end, self.writes = begin, end, 0
        with kernel.lock:
            kernel.register(begin, end)
            kernel.look(begin, end)
            kernel.watches.add(self)
        self._end = weakref.finalize(self, _end_watch, kernel, begin, end)
        self._end.atexit = False


def _end_watch(kernel: _Kernel, begin: int, end: int) -> None:
    if kernel is not _kernel:
        return  # a forked child, whose descriptors are its parent's
    with kernel.lock:
        with contextlib.suppress(OSError):
            kernel.unregister(begin, end)
        for other in kernel.watches:
            if begin < other.end and other.begin < end:
                other.writes += 1
                with contextlib.suppress(OSError):  # its next look says so
                    kernel.register(other.begin, other.end)


_kernel: _Kernel | None = None
_tried = False


def _kernel_of_this_process() -> _Kernel | None:
    global _kernel, _tried
    if not _tried:
        _tried = True
        with contextlib.suppress(OSError, KeyError, ImportError, AttributeError):
            _kernel = _Kernel()
    return _kernel


def _forget_after_fork() -> None:
    global _kernel, _tried
    if _kernel is not None:
        _kernel.close()
    _kernel, _tried = None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def watches_pages() -> bool:
    """Whether the kernel tells of writes to large masters, too."""
    return _kernel_of_this_process() is not None


class MemoryWatch:
    """Counts the writes to a master's bytes, whoever makes them. Exact where `watches_pages`."""

    def __init__(self, master: torch.Tensor) -> None:
        self.address, self.bytes = _extent(master)
        self._count = 0
        self._kernel = _kernel_of_this_process()
        self._pages: _Pages | None = None
        begin = -(-self.address // _PAGE) * _PAGE
        end = (self.address + self.bytes) // _PAGE * _PAGE
        self._whole = begin, end
        self._watch_pages()
        self._seen: tuple[Any, ...] = self._state()

    def _watch_pages(self) -> None:
        begin, end = self._whole
        if self._kernel is not None and end - begin >= _WATCHED:
            with contextlib.suppress(OSError):
                self._pages = _Pages(self._kernel, begin, end)

    def of(self, master: torch.Tensor) -> bool:
        """Whether the master's bytes are still those that are watched."""
        return (self.address, self.bytes) == _extent(master)

    def writes(self) -> int:
        """Look. Another number than before if something has been written since."""
        now = self._state()
        if now != self._seen:
            self._seen = now
            self._count += 1
        return self._count

    def note_write(self) -> None:
        """Somebody has written, or is about to: counted where the kernel does not tell."""
        if not watches_pages():
            self._count += 1

    def expect_writes(self) -> None:
        """Much is about to be written: until the next look it costs no page faults."""
        if self._pages is not None and self._kernel is _kernel and self._kernel is not None:
            with contextlib.suppress(OSError):
                self._kernel.lift(self._pages.begin, self._pages.end)

    def _state(self) -> tuple[Any, ...]:
        begin, end = self._whole
        if self._pages is not None:
            try:
                if self._kernel is None or self._kernel is not _kernel:
                    raise OSError("a forked child")
                with self._kernel.lock:
                    self._kernel.look(begin, end)
            except OSError:  # other memory has been mapped there, or this is a forked child
                self._count += 1
                self._kernel, self._pages = _kernel_of_this_process(), None
                self._watch_pages()
        if self._pages is None:
            whole = self.bytes <= _COMPARED
            return (
                ctypes.string_at(self.address, self.bytes) if whole else _sample(self.address, self.bytes),
            )
        before = ctypes.string_at(self.address, begin - self.address)
        return before, self._pages.writes, ctypes.string_at(end, self.address + self.bytes - end)


def _extent(master: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and how many there are to the last."""
    elements = 1 + sum(
        (size - 1) * stride for size, stride in zip(master.shape, master.stride(), strict=True)
    )
    return master.data_ptr(), elements * master.element_size() if master.numel() else 0


def _sample(address: int, size: int, count: int = 16) -> bytes:
    step = (size - 8) // (count - 1)
    return b"".join(ctypes.string_at(address + i * step, 8) for i in range(count))
