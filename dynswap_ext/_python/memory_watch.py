"""Whether a master's bytes have been written to (pure-Python provider; native: csrc/io/memory_watch.h).

`p.data[i] = x`, NumPy, DLPack and fused optimizers bump no version counter. Since Linux 6.7 the kernel can
track the pages that are written: they are registered with a userfaultfd and write-protected, the first write
to a page lifts its protection, and PAGEMAP_SCAN finds such pages and protects them again.
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

from dynswap_ext._python.mapped_files import mapped_files, span, what_is_missing

#: Bytes from which on the kernel watches a master. Smaller ones, and ends that share a page, are compared.
_WATCHED: Final = 32 << 10
#: Bytes above which a master that the kernel does not watch is sampled: a few places of it are compared.
_COMPARED: Final = 64 << 10
_PAGE: Final = mmap.PAGESIZE

# Of <linux/userfaultfd.h> and <linux/fs.h>; of the system call, the number by `platform.machine()`.
_SYSCALL: Final = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY: Final = 1
_UFFD_API: Final = 0xAA
_WP_ASYNC_AND_UNPOPULATED: Final = 1 << 15 | 1 << 13
_UFFDIO_API: Final = 0xC018AA3F
_UFFDIO_REGISTER: Final = 0xC020AA00
_UFFDIO_UNREGISTER: Final = 0x8010AA01
_UFFDIO_WRITEPROTECT: Final = 0xC018AA06
_MODE_WP: Final = 2
_PAGEMAP_SCAN: Final = 0xC0606610
_PROTECT_AND_FAIL_IF_UNREGISTERED: Final = 1 | 2
_WRITTEN: Final = 2
_REGIONS: Final = 64


class _Kernel:
    """The userfaultfd of this process, and the watches that use it. Thread-safe.

    Raises
    ------
    OSError, KeyError, ImportError, AttributeError
        This system does not track pages.
    """

    def __init__(self) -> None:
        import fcntl

        self._ioctl = fcntl.ioctl
        #: Reentrant: a garbage collection may end a watch while the same thread looks at another.
        self.lock = threading.RLock()
        # LOCK: `lock` guards `watches`, and the protection of their pages.
        self.watches: weakref.WeakSet[_Pages] = weakref.WeakSet()
        self._uffd = ctypes.CDLL(None, use_errno=True).syscall(
            _SYSCALL[platform.machine()], os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY
        )
        if self._uffd < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self._control(_UFFDIO_API, _UFFD_API, _WP_ASYNC_AND_UNPOPULATED, 0)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        page = mmap.mmap(-1, _PAGE)  # to try it: the kernel may have no PAGEMAP_SCAN
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

    def unprotect(self, begin: int, end: int) -> None:
        self._control(_UFFDIO_WRITEPROTECT, begin, end - begin, 0)

    def look(self, begin: int, end: int) -> None:
        """Find the pages that were written, count the write for every watch over them, protect them again."""
        size = struct.calcsize("12Q")
        regions = (ctypes.c_uint64 * (3 * _REGIONS))()
        while begin < end:
            asked = size, _PROTECT_AND_FAIL_IF_UNREGISTERED, begin, end, 0
            into = ctypes.addressof(regions), _REGIONS, 0
            scan = bytearray(struct.pack("12Q", *asked, *into, 0, _WRITTEN, 0, _WRITTEN))
            found = self._ioctl(self._pagemap, _PAGEMAP_SCAN, scan, True)
            for i in range(found):
                first, last = regions[3 * i], regions[3 * i + 1]
                for watch in self.watches:
                    if first < watch.end and watch.begin < last:
                        watch.writes += 1
            begin = struct.unpack_from("Q", scan, 32)[0]


class _Pages:
    """A range of whole pages that the kernel watches; `writes` counts the looks that found a write."""

    def __init__(self, kernel: _Kernel, begin: int, end: int, writes: int) -> None:
        self.begin, self.end, self.writes = begin, end, writes
        with kernel.lock:
            kernel.register(begin, end)
            kernel.look(begin, end)
            kernel.watches.add(self)
        self._end = weakref.finalize(self, _end_watch, kernel, begin, end)
        self._end.atexit = False


def _end_watch(kernel: _Kernel, begin: int, end: int) -> None:
    """End a watch: the pages that no other one is over are tracked no more."""
    if kernel is not _kernel:
        return  # this is a forked child, and the descriptors are its parent's
    with kernel.lock:
        over = sorted((other.begin, other.end) for other in kernel.watches)
        for first, last in (*over, (end, end)):
            if begin < min(first, end):
                with contextlib.suppress(OSError):  # the memory may be gone
                    kernel.unregister(begin, min(first, end))
            begin = max(begin, last)


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


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_forget_after_fork)


def is_sampled(master: torch.Tensor) -> bool:
    """Whether only a few places of the master are compared, so that a small write may go unseen.

    So it is with masters of more than 64 KiB where the kernel does not track pages, or tracks this process's
    writes alone and others write to the memory too.
    """
    if master.device.type != "cpu" or master.nbytes <= _COMPARED:
        return False
    return _kernel_of_this_process() is None or bool(master.is_shared())  # type: ignore[no-untyped-call]


class MemoryWatch:
    """Counts the writes to a master's bytes, whoever makes them. Exact, unless it `is_sampled`."""

    def __init__(self, master: torch.Tensor) -> None:
        self.address, self.bytes = master.data_ptr(), span(master)
        begin = -(-self.address // _PAGE) * _PAGE
        self._whole = begin, (self.address + self.bytes) // _PAGE * _PAGE
        #: Whether a look may miss a write. A version has to tell of it then.
        self.sampled = is_sampled(master)
        self._layout = tuple(master.shape), tuple(master.stride()), master.element_size()
        self._dense = master.nbytes == self.bytes
        self._files = mapped_files(master)
        self._of_elements = b"" if self._dense or self._is_gone() else self._elements()
        self._count = 0
        self._watch_pages()
        #: The bytes, where a look only compares all of them with what they were.
        self._memory: ctypes.Array[ctypes.c_char] | None = None
        only_compared = self._pages is None and self._dense and not self.sampled and not self._files
        if only_compared and self.address:  # a functional tensor's is 0
            self._memory = (ctypes.c_char * self.bytes).from_address(self.address)
        self._seen: Any = self._state() if self._memory is None else bytearray(self._memory)

    def _watch_pages(self, writes: int = 0) -> None:
        begin, end = self._whole
        self._kernel, self._pages = _kernel_of_this_process(), None
        if self._kernel is not None and end - begin >= _WATCHED:
            with contextlib.suppress(OSError):
                self._pages = _Pages(self._kernel, begin, end, writes)

    def _is_gone(self) -> bool:
        """Return whether the bytes cannot be read any more (Note [Mapped files that become shorter])."""
        return bool(what_is_missing(self._files, self.address, self.bytes))

    def of(self, master: torch.Tensor) -> bool:
        """Whether the master's bytes are still those that are watched."""
        return (self.address, self.bytes) == (master.data_ptr(), span(master))

    def writes(self) -> int:
        """Look for writes; return a count that differs from the last one if any was made since."""
        if self._memory is not None:
            if self._seen != self._memory:  # a bytearray compares with memory as it is, without a copy of it
                self._seen = bytearray(self._memory)
                self._count += 1
            return self._count
        now = self._state()
        if now != self._seen:
            self._seen = now
            if self._dense or not now or self._elements_changed():
                self._count += 1
        return self._count

    def _elements_changed(self) -> bool:
        """Whether it was not just others' elements, in the gaps between these, that were written."""
        before, self._of_elements = self._of_elements, self._elements()
        return before != self._of_elements

    def _elements(self) -> bytes:
        if self._dense:
            return ctypes.string_at(self.address, self.bytes)
        shape, stride, size = self._layout
        span = torch.frombuffer((ctypes.c_char * self.bytes).from_address(self.address), dtype=torch.uint8)
        steps = tuple(each * size for each in stride)
        elements = span.as_strided((*shape, size), (*steps, 1)).contiguous()
        return ctypes.string_at(elements.data_ptr(), elements.nbytes)

    def note_write(self) -> None:
        """Count a write that was made, or is about to be, unless a look sees every write."""
        if self.sampled:
            self._count += 1

    def expect_writes(self) -> None:
        """Announce that much is about to be written, so that it costs no page faults until the next look."""
        if self._pages is not None and self._kernel is _kernel and self._kernel is not None:
            with contextlib.suppress(OSError):
                self._kernel.unprotect(self._pages.begin, self._pages.end)

    def _state(self) -> tuple[Any, ...]:
        begin, end = self._whole
        if self._is_gone():
            self._count += 1
            return ()
        if self._pages is not None:
            if self._kernel is not _kernel:
                # A forked child, where what the parent handed out is the child's own: a write on it would be
                # dropped if the master counted as written.
                self._watch_pages(self._pages.writes)
            try:
                if self._kernel is not None and self._pages is not None:
                    with self._kernel.lock:
                        self._kernel.look(begin, end)
            except OSError:  # other memory has been mapped there
                self._count += 1
                self._watch_pages()
        sample = _sample(self.address, self.bytes) if self.sampled else b""
        if self._pages is None:
            return sample or self._elements(), 0
        before = ctypes.string_at(self.address, begin - self.address)
        after = ctypes.string_at(end, self.address + self.bytes - end)
        return before, self._pages.writes, after, sample


def _sample(address: int, size: int, count: int = 16) -> bytes:
    """Return `count` words of 8 bytes, evenly spread."""
    step = (size - 8) // (count - 1)
    return b"".join(ctypes.string_at(address + i * step, 8) for i in range(count))
