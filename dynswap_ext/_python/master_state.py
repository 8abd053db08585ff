"""What a master was like when it was copied, to find out later whether it is another by now (pure Python).

`p.data[i] = x`, NumPy, DLPack and fused optimizers write to a master and bump no version counter. So bytes
are compared with what they were: all of them up to 64 KiB, a few places of more. Steps of optimizers, and
gradients that arrive, which a step is likely to follow, count as writes to a master that is sampled so. (The
native provider has the kernel track pages: csrc/io/memory_watch.h.)
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from dynswap_ext._python.mapped_files import mapped_files, span, what_is_missing

#: Bytes above which a master is sampled: a few places of it are compared.
_COMPARED: Final = 64 << 10
#: How many places, of 8 bytes each.
_PLACES: Final = 16


def is_sampled(master: torch.Tensor) -> bool:
    """Whether only a few places of the master are compared, so that a small write may go unseen.

    A master with gaps between its elements is not: its elements are compared with a copy of them.
    """
    return master.device.type == "cpu" and master.nbytes > _COMPARED and span(master) == master.nbytes


class NotedWrites:
    """Counts the writes to a master that somebody has told of, and that may have bumped no version."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class MasterState:
    """A master's place, version, layout and bytes at one time."""

    def __init__(self, master: torch.Tensor, noted: NotedWrites) -> None:
        self._identity = _identity(master)
        #: Whether the master counts the writes to it: an inference tensor does not.
        self.has_version = self._identity[0] is not None
        self._noted = noted if is_sampled(master) else None
        self._count = noted.count
        self._files = mapped_files(master)
        self._range = address, size = master.data_ptr(), span(master)
        if self._noted is not None:
            places, each = range(address, address + size - 7, (size - 8) // (_PLACES - 1)), 8
        else:
            places, each = range(address, address + 1), size
        # With gaps, others' elements are among the bytes. The address of a functional tensor is 0.
        looked_at = places if address and size == master.nbytes else ()
        self._memory = [(ctypes.c_char * each).from_address(place) for place in looked_at]
        # A bytearray compares with memory as it is, without a copy of it.
        self._bytes: list[Any] = [bytearray(part) for part in self._memory]

    def is_of(self, master: torch.Tensor) -> bool:
        """Whether the master is like this now, as far as can be seen; False may be wrong."""
        if self._identity != _identity(master) or not self._memory:
            return False
        if self._noted is not None and self._noted.count != self._count:
            return False
        return not (self._files and self._is_gone()) and self._bytes == self._memory

    def lies_as(self, master: torch.Tensor) -> bool:
        """Whether the master is where it was, with the same layout, and can be read."""
        return self._identity[1:] == _identity(master)[1:] and not self._is_gone()

    def _is_gone(self) -> bool:
        """Whether the bytes cannot be read any more (Note [Mapped files that become shorter])."""
        return bool(what_is_missing(self._files, *self._range))


def _identity(master: torch.Tensor) -> tuple[Any, ...]:
    """What changes when the master's content does; version None means that it cannot be told."""
    try:
        where = master.untyped_storage()._cdata, master.data_ptr()
    except RuntimeError:  # it has been swapped with a tensor that has no memory
        return ()
    try:
        version = master._version
    except RuntimeError:  # of an inference tensor
        version = None
    return version, *where, master.dtype, master.shape, master.stride(), master.is_conj(), master.is_neg()
