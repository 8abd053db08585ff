"""Memory that processes of one host share. It has no file, so nothing is left when they have ended."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Final

from dynswap_ext._util.file_mappings import FileMappings, mappings

_NAME: Final = "dynswap_ext"
#: What the list of mappings calls it (memfd_create(2)).
_MAPPED_AS: Final = f"/memfd:{_NAME} (deleted)"
#: The segments that this process has made or opened, by inode: whether it has made them.
_known: Final[dict[int, bool]] = {}


class SharedSegment:
    """A piece of shared memory that this process can map until it is closed. What is mapped stays mapped.

    Linux only.
    """

    def __init__(self, descriptor: int, *, made_here: bool) -> None:
        self.descriptor: Final = descriptor
        _known[os.fstat(descriptor).st_ino] = made_here

    @classmethod
    def make(cls, nbytes: int) -> SharedSegment:
        """Make a segment of zeros, whose pages take memory once they are written to."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, nbytes)
        return cls(descriptor, made_here=True)

    @classmethod
    def open(cls, path: str) -> SharedSegment:
        """Open the segment of another process by its `path` there. Raises OSError."""
        return cls(os.open(path, os.O_RDWR), made_here=False)

    @property
    def path(self) -> str:
        """Where processes of the same user and the same container can open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class MappedSegments(FileMappings):
    """The parts of segments that this process has mapped at one moment."""

    def __init__(self) -> None:
        # Most processes have none, and need not read the list of their mappings.
        self._mappings = mappings(_MAPPED_AS.__eq__) if _known else []

    def is_of_others(self, address: int) -> bool:
        """Return whether the byte at an address is in a segment that another process has made."""
        found = self.find(address)
        return found is not None and not _known[found.inode]


def offsets(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the offset of each piece in a segment, and then the size of the segment. No two share a page."""
    offset = 0
    for size in sizes:
        yield offset
        offset += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    yield offset
