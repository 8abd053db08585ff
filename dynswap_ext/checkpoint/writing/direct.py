"""Reads and writes files past the page cache, in whole pages."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dynswap_ext.checkpoint.formats.common import truncated
from dynswap_ext.errors import ConfigError, SourceError

#: With O_DIRECT, offsets, lengths and addresses are multiples of this. A page is enough for every disk.
ALIGNMENT: Final = 4096
#: Bytes that are read or written at a time, and that have one checksum.
BLOCK: Final = 4 << 20

_thread = threading.local()


def align_up(value: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-value // ALIGNMENT) * ALIGNMENT


def thread_buffer(use: str) -> mmap.mmap:
    """Return this thread's buffer for `use`, "read" or "write", with room for a block and two pages."""
    if use not in vars(_thread):
        setattr(_thread, use, mmap.mmap(-1, BLOCK + 2 * ALIGNMENT))
    buffer: mmap.mmap = getattr(_thread, use)
    return buffer


def file_control() -> ModuleType:
    """Return the module fcntl. ConfigError on Windows, which lacks it and cannot write or verify files."""
    try:
        import fcntl
    except ImportError:
        raise ConfigError(
            "checkpoints are written, converted and verified on Linux only so far; on this system save with "
            "safetensors.torch.save_model(), which holds the whole model in memory"
        ) from None
    return fcntl


class DirectFile:
    """A file for reads and writes at given positions, past the page cache if the file system allows that.

    Several threads may use it. With `write` it is open for writing, too, and is made if it does not exist.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self._control = file_control()
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT if write else os.O_RDONLY, 0o666)
        except OSError as error:
            if write:
                raise
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error
        self._cached = False
        try:
            self._control.fcntl(self.descriptor, self._control.F_SETFL, os.O_DIRECT)
        except (OSError, AttributeError):  # the file system, or the operating system, lacks O_DIRECT
            self._cached = True

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, begin: int, count: int, buffer: mmap.mmap) -> int:
        """Read `count` bytes of the file from `begin` on, and return where in the buffer they start.

        They may start within the first page, as whole pages are read. Raises SourceError if the read fails.
        """
        first = begin // ALIGNMENT * ALIGNMENT
        needed, got = begin - first + count, 0
        with memoryview(buffer) as view, view[: align_up(needed)] as pages:
            while got < needed:
                try:
                    with pages[got:] as rest:
                        step = self._transfer(os.preadv, rest, first + got)
                except OSError as error:
                    raise SourceError(f"{self.path} cannot be read: {error.strerror}") from error
                got += step
                # A direct read that ends within a page has met the end of the file.
                if step == 0 or (not self._cached and got % ALIGNMENT and got < needed):
                    raise truncated(self.path, first + needed, first + got, "a tensor")
        self._drop(first, needed)
        return begin - first

    def write(self, begin: int, count: int, buffer: mmap.mmap) -> None:
        """Write the buffer's first `count` bytes at `begin`. Both are multiples of `ALIGNMENT`."""
        written = 0
        with memoryview(buffer) as view:
            while written < count:
                with view[written:count] as rest:
                    written += self._transfer(os.pwritev, rest, begin + written)
        if self._cached:
            os.fdatasync(self.descriptor)  # so that the bytes are read back from the disk, not the cache
        self._drop(begin, count)

    def _transfer(self, call: Callable[..., Any], view: memoryview, offset: int) -> int:
        try:
            return int(call(self.descriptor, [view], offset))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # Some file systems accept O_DIRECT, and then refuse each transfer.
        self._control.fcntl(self.descriptor, self._control.F_SETFL, 0)
        self._cached = True
        return int(call(self.descriptor, [view], offset))

    def _drop(self, begin: int, count: int) -> None:
        if self._cached:
            os.posix_fadvise(self.descriptor, begin, count, os.POSIX_FADV_DONTNEED)


class Files(ExitStack):
    """A context that opens each file once, for several threads to read, and closes all of them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, DirectFile] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> DirectFile:
        with self._lock:
            if path not in self._open:
                self._open[path] = self.enter_context(DirectFile(path))
            return self._open[path]
