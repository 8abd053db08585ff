"""The state of a master when it was copied, to find out later whether it has changed (pure-Python provider).

`p.data[i] = x`, NumPy, DLPack and fused optimizers write to a master and bump no version counter. So its
bytes are compared with those of before: all of them up to 64 KiB, and in a larger master a few places. Such a
sampled master also counts as written after a step of an optimizer, and after a gradient has arrived, which a
step is likely to follow. (The native provider has the kernel track pages: csrc/io/memory_watch.h.)
A coded master is not written as long as it is coded.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

from dynswap_ext._python.coded_masters import memory_of, place_of
from dynswap_ext._python.mapped_files import mapped_files, span, what_is_missing
from dynswap_ext.lossless.tensor import LosslessTensor

#: The most bytes that are all compared. A larger master is sampled: a few places of it are compared.
_COMPARED: Final = 64 << 10
#: The places of 8 bytes that are compared in a sampled master.
_PLACES: Final = 16


def is_sampled(master: torch.Tensor) -> bool:
    """Return whether only a few places of a master are compared, so that a small write may go unseen.

    Of a master with gaps between its elements, all elements are compared, with a copy of them.
    """
    if type(master) is LosslessTensor and master.coded is not None:
        return False
    return master.device.type == "cpu" and master.nbytes > _COMPARED and span(master) == master.nbytes


class NotedWrites:
    """Counts the reported writes to a master, such as an optimizer's steps, which may bump no version."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class MasterState:
    """A master's memory, version, layout and bytes at the time when the object is made."""

    def __init__(self, master: torch.Tensor, noted: NotedWrites) -> None:
        self._identity = _identity(master)
        #: Whether the master counts the writes to it: an inference tensor does not.
        self.has_version = self._identity[0] is not None
        memory = memory_of(master) if type(master) is LosslessTensor else master
        #: Coded bytes are kept, since they are dropped when the master becomes plain.
        self._coded = None if memory.dtype == master.dtype else memory
        self._noted = noted if is_sampled(master) else None
        self._count = noted.count
        self._files = mapped_files(memory)
        self._range = address, size = memory.data_ptr(), span(memory)
        if size > _COMPARED:
            places, each = range(address, address + size - 7, (size - 8) // (_PLACES - 1)), 8
        else:
            places, each = range(address, address + 1), size
        # In gaps there are elements of other tensors. The address of a functional tensor is 0.
        looked_at = places if address and size == memory.nbytes else ()
        self._memory = [(ctypes.c_char * each).from_address(place) for place in looked_at]
        # A bytearray can be compared with that memory without a copy of it.
        self._bytes: list[Any] = [bytearray(part) for part in self._memory]

    def is_of(self, master: torch.Tensor) -> bool:
        """Return whether the master is in this state now, as far as can be seen.

        False may mean that this cannot be told.
        """
        if self._identity != _identity(master) or not self._memory:
            return False
        if self._noted is not None and self._noted.count != self._count:
            return False
        return not (self._files and self._is_gone()) and self._bytes == self._memory

    def lies_as(self, master: torch.Tensor) -> bool:
        """Return whether the master has the same memory and layout as then, and can be read."""
        return self._identity[2:] == _identity(master)[2:] and not self._is_gone()

    def _is_gone(self) -> bool:
        """Return whether the bytes cannot be read any more (Note [Mapped files that become shorter])."""
        return bool(what_is_missing(self._files, *self._range))


def _identity(master: torch.Tensor) -> tuple[Any, ...]:
    """Return a master's version, whether it is coded, and its memory, dtype and layout.

    The version of an inference tensor is None. The result is empty if the master has no memory.
    """
    try:
        if type(master) is LosslessTensor:
            where: tuple[Any, ...] = master.coded is not None, *place_of(master)
        else:
            where = False, master.untyped_storage()._cdata, master.data_ptr()
    except RuntimeError:  # the master was swapped with a tensor that has no memory
        return ()
    try:
        version = master._version
    except RuntimeError:  # of an inference tensor
        version = None
    return version, *where, master.dtype, master.shape, master.stride(), master.is_conj(), master.is_neg()
