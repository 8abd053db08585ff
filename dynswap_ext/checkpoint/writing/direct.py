"""Files that are read and written around the page cache, in whole pages."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dynswap_ext.checkpoint.formats.common import truncated
from dynswap_ext.errors import SourceError

#: What O_DIRECT asks of offsets, lengths and addresses: the size of a page satisfies every disk.
ALIGNMENT: Final = 4096
#: Bytes that are read from a file at a time.
WINDOW: Final = 4 << 20

_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_thread = threading.local()


def align_up(value: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return -(-value // alignment) * alignment


def page_buffer(size: int) -> mmap.mmap:
    """Memory that begins at a page."""
    return mmap.mmap(-1, align_up(size))


def thread_buffer(use: str) -> mmap.mmap:
    """Return this thread's memory for one use: a window, and a page on each side of it."""
    if use not in vars(_thread):
        setattr(_thread, use, page_buffer(WINDOW + 2 * ALIGNMENT))
    buffer: mmap.mmap = getattr(_thread, use)
    return buffer


class DirectFile:
    """A file for positioned reads and writes from several threads; uncached where the file system allows it.

    With `write` it is open for writing as well, and made if need be. With `cache` it is read through the page
    cache, and what was read stays there.
    """

    def __init__(self, path: Path, *, write: bool = False, cache: bool = False) -> None:
        self.path, self._cache = path, cache
        self._flags = (os.O_RDWR | os.O_CREAT) if write else os.O_RDONLY
        self._cached = cache or not _DIRECT
        try:
            try:
                self.descriptor = os.open(path, self._flags | (0 if cache else _DIRECT), 0o666)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a file system that has no such reads
                    raise
                self.descriptor, self._cached = os.open(path, self._flags, 0o666), True
        except OSError as error:
            if write:
                raise
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, begin: int, count: int, buffer: mmap.mmap, what: str = "a tensor") -> int:
        """Read `count` bytes from `begin` on; the place in the buffer at which they start.

        The buffer has to have room for two more pages than `count`. `what` names them in errors.

        Raises
        ------
        SourceError
            The file ends before, or the disk fails.
        """
        first = begin // ALIGNMENT * ALIGNMENT
        with memoryview(buffer) as view, view[: align_up(begin + count) - first] as pages:
            self.readinto(first, pages, begin - first + count, what)
        return begin - first

    def readinto(self, begin: int, view: memoryview, count: int, what: str) -> None:
        """Read at least `count` bytes. Without the page cache, `begin` and the view are of whole pages."""
        got = 0
        while got < count:
            try:
                with view[got:] as rest:
                    step = self._transfer(os.preadv, rest, begin + got)
            except OSError as error:
                raise SourceError(f"{self.path} cannot be read at {what}: {error.strerror}") from error
            got += step
            # A direct read that ends within a page has met the end of the file.
            if step == 0 or (not self._cached and got % ALIGNMENT and got < count):
                raise truncated(self.path, begin + count, begin + got, what)
        self._drop(begin, len(view))

    def write(self, begin: int, count: int, buffer: mmap.mmap) -> None:
        """Write the buffer's first `count` bytes; both numbers are multiples of `ALIGNMENT`."""
        written = 0
        with memoryview(buffer) as view:
            while written < count:
                with view[written:count] as rest:
                    written += self._transfer(os.pwritev, rest, begin + written)
        if self._cached:
            getattr(os, "fdatasync", os.fsync)(self.descriptor)  # what is read back shall come from the disk
        self._drop(begin, count)

    def _transfer(self, call: Callable[..., Any], view: memoryview, offset: int) -> int:
        try:
            return int(call(self.descriptor, [view], offset))
        except OSError as error:
            if self._cached or error.errno != errno.EINVAL:
                raise
        # Some file systems open a file so, and refuse each transfer. Two threads may both come here.
        plain = os.open(self.path, self._flags)
        os.dup2(plain, self.descriptor)
        os.close(plain)
        self._cached = True
        return int(call(self.descriptor, [view], offset))

    def _drop(self, begin: int, count: int) -> None:
        if self._cached and not self._cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, begin, count, os.POSIX_FADV_DONTNEED)
