"""What the formats share: opening a file that may be anything, JSON from strangers, tensors of a mapping."""

from __future__ import annotations

import ctypes
import difflib
import errno
import json
import os
import reprlib
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

from dynswap_ext._util.memory import exact_bytes
from dynswap_ext.checkpoint.reader import Entry
from dynswap_ext.errors import SourceError

#: The remedy for a file that lacks something.
AGAIN = "download or copy it again"


def is_inside(name: str) -> bool:
    """Return whether a name that a file gives is that of a file in the same folder."""
    parts = PurePosixPath(name)
    is_text = name.encode(errors="replace").decode() == name and "\0" not in name
    return is_text and bool(parts.name) and not parts.is_absolute() and ".." not in parts.parts


def truncated(path: Path, expected: int, size: int, what: str) -> SourceError:
    """Return the error for a file that is shorter than `what` needs."""
    return SourceError(
        f"{path} is cut short: {what} needs {exact_bytes(expected)}, the file has {exact_bytes(size)}; "
        f"{AGAIN}"
    )


# ---- opening -----------------------------------------------------------------------------------------------


#: Without O_NONBLOCK, opening a FIFO waits for a writer; without O_BINARY, Windows reads text. No system has
#: all of these.
_READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file, and yield its descriptor and its size.

    Raises
    ------
    SourceError
        It is not there, not a regular file, not permitted, or the disk fails, also inside the block.
        Names the file and the remedy.
    """
    if "\0" in str(path):
        raise SourceError(f"{str(path)!r} is no file name (it has a NUL); correct the name")
    try:
        descriptor = os.open(path, _READ)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                kind = "folder" if stat.S_ISDIR(status.st_mode) else "device or a pipe"
                raise SourceError(
                    f"{path} is a {kind}, not a file that can be mapped; copy its content to a file"
                )
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"no such file: {path}{_neighbours(path)}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            problem = "is a symbolic link that leads back to itself; link it to the file again"
        else:
            problem = f"cannot be read: {error.strerror}; check its permissions and the disk"
        raise SourceError(f"{path} {problem}") from error


def _neighbours(path: Path) -> str:
    try:
        if path.is_symlink():
            return f" (a link to {os.readlink(path)}, which does not exist; download it again)"
        names = [entry.name for entry in path.parent.iterdir()]
    except FileNotFoundError:
        return f" (nor is there a folder {path.parent})"
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def content_of(path: Path, limit: int, what: str) -> bytes:
    """Read a whole file. SourceError if it has more than the `limit` bytes that a `what` may have."""
    with opened(path) as (descriptor, size):
        if size > limit:
            raise SourceError(f"{path} has {exact_bytes(size)}, {what} at most {exact_bytes(limit)}; {AGAIN}")
        return pread(descriptor, size, 0)


def pread(descriptor: int, length: int, offset: int) -> bytes:
    """Read `length` bytes, fewer at the end of the file only: `os.pread` may return fewer anywhere."""
    data = _read_once(descriptor, length, offset)
    while len(data) < length and (more := _read_once(descriptor, length - len(data), offset + len(data))):
        data += more
    return data


_position = threading.Lock()


def _read_once(descriptor: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _position:  # Windows: a read begins where the last one of this descriptor ended
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def read_into(file: BinaryIO, path: Path, offset: int, address: int, nbytes: int, what: str) -> None:
    """Read a range of an open file to an address in memory.

    Raises SourceError if the read fails or the file is too short. The message names `what` was to be read.
    """
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    try:
        file.seek(offset)
        got = file.readinto(memory)  # type: ignore[attr-defined]
    except OSError as error:
        raise SourceError(f"{path} cannot be read at {what}: {error.strerror}") from error
    if got < nbytes:
        raise truncated(path, offset + nbytes, offset + got, what)


# ---- JSON --------------------------------------------------------------------------------------------------


def parse_json(data: bytes) -> Any:
    """Parse UTF-8 JSON. ValueError also for a name twice in one object, NaN, an infinity or deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"it has {shown(twice)} twice")
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"it has {constant}, which is no JSON")

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxstring = 3, 6, 8, 8, 200


def shown(value: object) -> str:
    """Write what a file says, for an error: on one line, and about as long as one."""
    return _SHORT.repr(value)


# ---- sizes and tensors -------------------------------------------------------------------------------------


def byte_count(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. ValueError for lengths that are not integers, negative, or too large."""
    count = occupied = dtype.itemsize
    for length in shape:
        if type(length) is not int or length < 0:  # a bool is an int, and no length
            raise ValueError(f"its shape has the length {shown(length)}")
        count *= length
        occupied *= length or 1  # what strides are computed from
        if occupied >= 1 << 63:  # what torch counts with
            raise ValueError("it has more bytes than can be counted")
    return count


def mapped_tensor(storage: torch.UntypedStorage, entry: Entry) -> torch.Tensor:
    """Return a contiguous tensor over an entry's bytes in its mapped file, aligned or not."""
    tensor = torch.empty(0, dtype=entry.dtype)
    if entry.nbytes:
        assert entry.offset is not None
        # A slice, so that each tensor has a storage of just its bytes (torch.save writes storages whole).
        tensor.set_(storage[entry.offset : entry.offset + entry.nbytes])
    return tensor.reshape(entry.shape)
