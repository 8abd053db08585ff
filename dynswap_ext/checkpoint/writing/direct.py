"""Files read and written around the page cache, in blocks, and the errors of a disk as sentences."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dynswap_ext.checkpoint.formats.common import truncated
from dynswap_ext.errors import DynswapError, SourceError

#: What O_DIRECT asks of offsets, lengths and addresses: the size of a page satisfies every disk.
ALIGNMENT: Final = 4096

_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def align_up(value: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of `alignment`."""
    return -(-value // alignment) * alignment


def page_buffer(size: int) -> mmap.mmap:
    """Memory that begins at a page."""
    return mmap.mmap(-1, align_up(size))


class DirectFile:
    """A file for positioned reads and writes from several threads; uncached where the file system allows it.

    Parameters
    ----------
    path
        The file.
    write
        Open it for writing as well, and make it if need be.
    """

    def __init__(self, path: Path, *, write: bool = False) -> None:
        self.path = path
        self._flags = (os.O_RDWR | os.O_CREAT) if write else os.O_RDONLY
        try:
            self.descriptor, self._cached = self._open()
        except OSError as error:
            if write:
                raise
            raise SourceError(f"{path} cannot be read: {error.strerror}") from error

    def _open(self) -> tuple[int, bool]:
        if _DIRECT:
            try:
                return os.open(self.path, self._flags | _DIRECT, 0o666), False
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a file system that has no such reads
                    raise
        return os.open(self.path, self._flags, 0o666), True

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, begin: int, count: int, buffer: mmap.mmap) -> int:
        """Read `count` bytes from `begin` on; the place in the buffer at which they start.

        The buffer has to have room for two more pages than `count`.

        Raises
        ------
        SourceError
            The file ends before, or the disk fails.
        """
        first = begin // ALIGNMENT * ALIGNMENT
        wanted = align_up(begin + count) - first
        got = 0
        with memoryview(buffer) as view:
            while got < begin - first + count:
                try:
                    with view[got:wanted] as rest:
                        step = self._transfer(os.preadv, rest, first + got)
                except OSError as error:
                    raise SourceError(f"{self.path} cannot be read: {error.strerror}") from error
                if step == 0:
                    raise truncated(self.path, begin + count, first + got, "a tensor")
                got += step
                # A direct read that ends within a page has met the end of the file.
                if got % ALIGNMENT and got < begin - first + count:
                    raise truncated(self.path, begin + count, first + got, "a tensor")
        if self._cached:
            self._drop(first, wanted)
        return begin - first

    def write(self, begin: int, count: int, buffer: mmap.mmap) -> None:
        """Write the buffer's first `count` bytes; both numbers are multiples of `ALIGNMENT`."""
        put = 0
        with memoryview(buffer) as view:
            while put < count:
                with view[put:count] as rest:
                    put += self._transfer(os.pwritev, rest, begin + put)
        if self._cached:
            getattr(os, "fdatasync", os.fsync)(self.descriptor)  # what is read back shall come from the disk
            self._drop(begin, count)

    def _transfer(self, call: object, view: memoryview, offset: int) -> int:
        try:
            return call(self.descriptor, [view], offset)  # type: ignore[operator, no-any-return]
        except OSError as error:
            if self._cached or error.errno != errno.EINVAL:
                raise
        # Some file systems open a file so, and refuse each transfer. Two threads may both come here.
        plain = os.open(self.path, self._flags)
        os.dup2(plain, self.descriptor)
        os.close(plain)
        self._cached = True
        return call(self.descriptor, [view], offset)  # type: ignore[operator, no-any-return]

    def _drop(self, begin: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, begin, count, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_free(path: Path, folder: Path, needed: int) -> None:
    """Raise SourceError if what shall be written at `path` does not fit the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SourceError(_no_room(path, folder, needed, "the disk is too full"))


@contextmanager
def explained(path: Path, folder: Path, needed: int) -> Iterator[None]:
    """Turns errors of the system into SourceError.

    Parameters
    ----------
    path
        What is being written.
    folder
        Where it lies, for the room that is left.
    needed
        Bytes of the whole.
    """
    try:
        yield
    except DynswapError:
        raise
    except OSError as error:
        what = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        if error.errno in _NO_ROOM:
            message = _no_room(path, folder, needed, what)
        elif error.errno in _REFUSED:
            message = f"{path} cannot be written{where}: {what}; check the permissions of {folder}"
        else:
            message = f"{path} cannot be written{where}: {what}"
        raise SourceError(message) from error


def _no_room(path: Path, folder: Path, needed: int, why: str) -> str:
    free = ""
    with suppress(OSError):
        free = f", and {folder} has {shutil.disk_usage(folder).free:,} free"
    return (
        f"{path} cannot be written: {why}. It needs {needed:,} bytes{free}; make room (limits on the size of "
        "files and quotas count too), or choose another folder"
    )
