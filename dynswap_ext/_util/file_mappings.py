"""The files that are mapped into this process's memory, and the place in a file that an address shows."""

from __future__ import annotations

import array
import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

#: Beginnings of the names of mappings that are not of ordinary files.
_MEMORY: Final = ("/dev/", "/memfd:", "/SYSV")
_PAGE: Final = mmap.PAGESIZE
# Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
_HERE: Final = 1 << 63 | 1 << 62  # present, or swapped
_OF_FILE: Final = 1 << 61


class Mapping(NamedTuple):
    """A range of a file that is mapped into this process's memory."""

    #: The first address, and the one after the last.
    begin: int
    end: int
    #: The offset in the file of the byte at `begin`.
    offset: int
    #: The major and minor number of the file's device, as in "fd:00".
    device: str
    inode: int
    #: The path of the file when it was mapped. If the file is deleted, the kernel adds " (deleted)".
    name: str

    @property
    def path(self) -> Path | None:
        """The path of the file; None if the file was deleted or replaced, or may not be read."""
        try:
            status = os.stat(self.name)
        except OSError:
            return None
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        same = (device, status.st_ino) == (self.device, self.inode)
        return Path(self.name) if same and os.access(self.name, os.R_OK) else None

    def offset_of(self, address: int) -> int:
        """Return the offset in the file of the byte at an address."""
        return self.offset + address - self.begin


def _is_file(name: str) -> bool:
    return name.startswith("/") and not name.startswith(_MEMORY)


def mappings(wanted: Callable[[str], bool] = _is_file) -> list[Mapping]:
    """Return the file mappings of this process, in the order of their addresses; none outside Linux.

    `wanted` tells from a name whether a mapping is among them. By default those of files are.
    """
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()  # proc_pid_maps(5)
    except OSError:
        return []
    found: list[Mapping] = []
    for line in lines:
        addresses, _, offset, device, inode, *name = line.split(maxsplit=5)
        if not name or not wanted(name[0]):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        new = Mapping(begin, end, int(offset, 16), device, int(inode), name[0])
        last = found[-1] if found else None
        # A write to a private mapping can split it: the parts are joined again.
        if last and new == (last.end, end, last.offset + last.end - last.begin, *last[3:]):
            found[-1] = last._replace(end=end)
        else:
            found.append(new)
    return found


class FileMappings:
    """An index of the file mappings that this process has when the object is made."""

    def __init__(self) -> None:
        self._mappings = mappings()

    def __len__(self) -> int:
        return len(self._mappings)

    def find(self, address: int) -> Mapping | None:
        """Return the mapping that contains an address; None if there is none."""
        return next(iter(self.overlapping(address, 1)), None)

    def overlapping(self, address: int, nbytes: int) -> list[Mapping]:
        """Return the mappings that contain any of the bytes at an address. A fused weight has several."""
        first = bisect_right(self._mappings, address, key=lambda mapping: mapping.end)
        last = bisect_right(self._mappings, address + nbytes - 1, key=lambda mapping: mapping.begin)
        return self._mappings[first:last]


def mapped_ranges(path: Path) -> list[tuple[int, int]]:
    """Return address and length of each of this process's mappings of a file."""
    wanted = str(path.resolve())
    return [(mapping.begin, mapping.end - mapping.begin) for mapping in mappings() if mapping.name == wanted]


def written_bytes(ranges: Sequence[tuple[int, int]]) -> int:
    """Return how many bytes of mapped files this process has copied by writing to them.

    `ranges` are the addresses at which the mappings begin and end. 0 on systems other than Linux.
    """
    if not ranges:
        return 0
    try:
        lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines()  # proc_pid_smaps(5)
    except OSError:
        return 0
    ranges = sorted(ranges)
    found, counts = 0, False
    for line in lines:
        name, *values = line.split()
        if not name.endswith(":"):
            begin = int(name.split("-")[0], 16)
            at = bisect_right(ranges, begin, key=lambda of: of[0]) - 1
            counts = at >= 0 and begin < ranges[at][1]
        elif counts and name in ("Anonymous:", "Swap:"):
            found += int(values[0]) << 10
    return found


def private_pages(address: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each part of a mapped range that is on a page which was written to.

    The range is `count` bytes at an address. Pages that were written to are this process's own, and may
    differ from the file.
    """
    first, last = address // _PAGE, -(-(address + count) // _PAGE)
    entries = array.array("Q")
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * entries.itemsize)
            entries.frombytes(pagemap.read((last - first) * entries.itemsize))
    except OSError:  # a container may hide the pagemap: then any page may have been written to
        yield address, address + count
        return
    for page, entry in enumerate(entries, first):
        if entry & _HERE and not entry & _OF_FILE:
            yield max(page * _PAGE, address), min((page + 1) * _PAGE, address + count)


def drop_file_cache(path: Path) -> None:
    """Drop a file's pages from this process's mappings and from the page cache.

    What was written through a private mapping of the file would be lost.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for start, length in mapped_ranges(path):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
