"""Reads the bytes of a checkpoint's tensors into memory of its own, a window at a time.

For computing with the values. Read through the mapping, the pages would stay part of this process, a file
cut short meanwhile would end the process, and values would include what was written to the mapping
of a checkpoint that is open for longer.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dynswap_ext._swap.subclasses import flatten_wrapper, is_plain
from dynswap_ext.checkpoint.formats.common import truncated
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

_malloc_trim: Callable[[int], object] = getattr(
    ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", lambda _: None
)

#: Less than that the heap holds without harm, and a mapping would cost more than it.
_OF_THE_HEAP = 1 << 16
#: What is read at a time of an entry that is cast, moved or compared. Larger ones read no faster.
_WINDOW = 16 << 20


class Window(ExitStack):
    """Reads entries of one checkpoint, whose files are open until the block ends.

    Each method raises SourceError if a file cannot be read, or has become shorter.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._files: dict[Path, Any] = {}
        self._since_trim = 0

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of its own with the values of an entry."""
        entry = self._range(name)
        if entry is None:
            tensor = self._checkpoint.tensor(name)
            if not is_plain(tensor):
                return tensor.to(device=device, dtype=dtype)
            return tensor.detach().to(device=device, dtype=dtype, copy=True)
        if device.type == "cpu" and dtype == entry.dtype:
            self._trim(entry.nbytes)
            flat = _memory(entry.nbytes).view(dtype)
            self._fill(name, entry, 0, flat)
        else:
            flat = torch.empty(entry.nbytes // entry.dtype.itemsize, dtype=dtype, device=device)
            parts = torch.split(flat, _WINDOW // entry.dtype.itemsize)
            for part, block in zip(parts, self._blocks(name, entry), strict=False):
                part.copy_(block)
        return flat.view(entry.shape)

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is to the bit what the entry is in the file."""
        entry = self._range(name)
        if entry is None:
            return _equal(self._checkpoint.tensor(name), tensor)
        if (tensor.device.type, tensor.dtype, tuple(tensor.shape)) != ("cpu", entry.dtype, entry.shape):
            return False
        parts = torch.split(tensor.detach().reshape(-1), _WINDOW // entry.dtype.itemsize)
        return _all_equal(self._blocks(name, entry), parts)

    def same(self, left: str, right: str) -> bool:
        """Whether two entries are equal to the bit."""
        first, second = self._range(left), self._range(right)
        if first is None or second is None:
            return _equal(self._checkpoint.tensor(left), self._checkpoint.tensor(right))
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        one_range = (first.file, first.offset) == (second.file, second.offset)
        return one_range or _all_equal(self._blocks(left, first), self._blocks(right, second))

    def _range(self, name: str) -> Entry | None:
        """The entry, if its bytes in the file are its values in order."""
        entry = self._checkpoint.entries[name]
        return None if entry.offset is None or entry.encoding else entry

    def _blocks(self, name: str, entry: Entry) -> Iterator[torch.Tensor]:
        """The values in order, one block after the other in the same memory."""
        buffer = _memory(min(_WINDOW, entry.nbytes)).view(entry.dtype)
        for start in range(0, entry.nbytes, _WINDOW):
            block = buffer[: (entry.nbytes - start) // entry.dtype.itemsize]
            self._fill(name, entry, start, block)
            yield block

    def _fill(self, name: str, entry: Entry, skipped: int, into: torch.Tensor) -> None:
        memory = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())).cast("B")
        begin = (entry.offset or 0) + skipped
        try:
            if entry.file not in self._files:
                self._files[entry.file] = self.enter_context(entry.file.open("rb"))
            self._files[entry.file].seek(begin)
            got = self._files[entry.file].readinto(memory)
        except OSError as error:
            raise SourceError(f"{entry.file} cannot be read at {name}: {error.strerror}") from error
        if got < into.nbytes:
            raise truncated(entry.file, begin + into.nbytes, begin + got, name)

    def _trim(self, nbytes: int) -> None:
        """Let the heap give holes back: what a transform returns lies between what it needed meanwhile."""
        self._since_trim += nbytes
        if self._since_trim > _WINDOW:
            self._since_trim = 0
            _malloc_trim(0)


def _memory(nbytes: int) -> torch.Tensor:
    """Return bytes that go back to the system when they are freed.

    The heap would keep holes between what stays: next to a result of half the size, one of the size of each
    tensor that was read.
    """
    if nbytes < _OF_THE_HEAP:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape or type(left) is not type(right):
        return False
    if is_plain(left):
        return left.device == right.device and _all_equal([left.detach()], [right.detach()])
    one, other = flatten_wrapper(left), flatten_wrapper(right)
    if one is None or other is None:
        return left is right
    return one[0].keys() == other[0].keys() and all(_equal(one[0][key], other[0][key]) for key in one[0])


def _all_equal(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(_bytes(one), _bytes(other)) for one, other in zip(left, right, strict=False))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # so that NaN equals itself
