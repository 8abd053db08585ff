"""Helpers of all formats: they open files of any kind, parse untrusted JSON, and make mapped tensors."""

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

#: The remedy, in errors, for a file that is damaged or incomplete.
AGAIN = "download or copy it again"


def is_inside(name: str) -> bool:
    """Return whether a file name that was read from a file stays inside that file's folder."""
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


#: Flags of `os.open`; no system has all of them. Without O_NONBLOCK, opening a FIFO waits for a writer.
#: Without O_BINARY, Windows converts line ends.
_READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Open a regular file, and yield its descriptor and its size.

    Raises
    ------
    SourceError
        The file does not exist, is not a regular file, or is not permitted; or the disk fails, here or inside
        the block. Names the file and the remedy.
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
    """Read a whole file of at most `limit` bytes. The SourceError for a larger file calls it `what`."""
    with opened(path) as (descriptor, size):
        if size > limit:
            raise SourceError(f"{path} has {exact_bytes(size)}, {what} at most {exact_bytes(limit)}; {AGAIN}")
        return pread(descriptor, size, 0)


def pread(descriptor: int, length: int, offset: int) -> bytes:
    """Read `length` bytes, or fewer at the end of the file, whereas `os.pread` may return fewer anywhere."""
    data = _read_once(descriptor, length, offset)
    while len(data) < length and (more := _read_once(descriptor, length - len(data), offset + len(data))):
        data += more
    return data


_position = threading.Lock()


def _read_once(descriptor: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, offset)
    with _position:  # Windows has no pread, and the position is shared by all threads
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, length)


def read_into(file: BinaryIO, path: Path, offset: int, address: int, nbytes: int, what: str) -> None:
    """Read a range of an open file to an address in memory.

    Raises SourceError if the read fails or the file is too short. `what` names the range in the message.
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
    """Parse UTF-8 JSON. ValueError also for NaN, infinities, deep nesting, or an object with a name twice."""

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
    """Return a value that was read from a file as text for an error, cut to about one line."""
    return _SHORT.repr(value)


# ---- sizes and tensors -------------------------------------------------------------------------------------


def byte_count(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. ValueError if a length is no integer, is negative, or is too large."""
    count = occupied = dtype.itemsize
    for length in shape:
        if type(length) is not int or length < 0:  # not isinstance: a bool is no length
            raise ValueError(f"its shape has the length {shown(length)}")
        count *= length
        occupied *= length or 1  # torch computes strides as if a length of 0 were 1
        if occupied >= 1 << 63:  # torch counts in 63 bits
            raise ValueError("it has more bytes than can be counted")
    return count


def mapped_tensor(storage: torch.UntypedStorage, entry: Entry) -> torch.Tensor:
    """Return a contiguous tensor over an entry's bytes in its mapped file. They need not be aligned."""
    tensor = torch.empty(0, dtype=entry.dtype)
    if entry.nbytes:
        assert entry.offset is not None
        # A slice, so that the tensor's storage is just its bytes: torch.save writes whole storages.
        tensor.set_(storage[entry.offset : entry.offset + entry.nbytes])
    return tensor.reshape(entry.shape)
