"""Reads the bytes of a checkpoint's tensors into memory of its own, a window at a time.

For whatever computes with the values. Read through the mapping, the pages would stay part of the process's
memory, a file cut short meanwhile would end the process, and values would be those that somebody wrote to
the mapping of a checkpoint that is open for longer.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from dynswap_ext._subclasses import is_plain, taken_apart
from dynswap_ext.checkpoint.formats.common import AGAIN
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

_malloc_trim: Callable[[int], object] = getattr(
    ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", lambda _: None
)

#: Less than that the heap holds without harm, and a mapping would cost more than it.
_OF_THE_HEAP = 1 << 16

__all__ = ["Window"]

#: What is read at a time of an entry that is cast, moved or compared. Larger ones read no faster.
_WINDOW = 16 << 20


class Window:
    """Reads entries of one checkpoint. A context manager, which keeps the files open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, BinaryIO] = {}
        self._open = ExitStack()
        self._since_trim = 0

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of its own with the values of an entry.

        Raises
        ------
        SourceError
            The file cannot be read, or has become shorter. Names file and entry.
        """
        entry = self._range(name)
        if entry is None:
            tensor = self._checkpoint.tensor(name)
            if not is_plain(tensor):
                return tensor.to(device=device, dtype=dtype)
            return tensor.detach().to(device=device, dtype=dtype, copy=True)
        if device.type == "cpu" and dtype == entry.dtype:
            self._trim(entry.nbytes)
            made = _memory(entry.nbytes).view(dtype).view(entry.shape)
            self._read(name, entry, 0, made)
            return made
        made = torch.empty(entry.shape, dtype=dtype, device=device)
        flat = made.view(-1)
        for start, block in self._blocks(name, entry):
            flat[start : start + block.numel()].copy_(block)
        return made

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor is to the bit what the entry says."""
        entry = self._range(name)
        if entry is None:
            return _equal(self._checkpoint.tensor(name), tensor)
        if tensor.device.type != "cpu":
            return False
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            return False
        flat = tensor.detach().reshape(-1)
        return all(
            torch.equal(_bytes(flat[start : start + block.numel()]), _bytes(block))
            for start, block in self._blocks(name, entry)
        )

    def same(self, left: str, right: str) -> bool:
        """Whether two entries are equal to the bit."""
        first, second = self._range(left), self._range(right)
        if first is None or second is None:
            return _equal(self._checkpoint.tensor(left), self._checkpoint.tensor(right))
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        if (first.file, first.offset) == (second.file, second.offset):
            return True
        pairs = zip(self._blocks(left, first), self._blocks(right, second), strict=True)
        return all(torch.equal(_bytes(a), _bytes(b)) for (_, a), (_, b) in pairs)

    def _range(self, name: str) -> Entry | None:
        """The entry, if its bytes in the file are its values in order."""
        entry = self._checkpoint.entries[name]
        if entry.offset is None or entry.encoding:
            return None
        tensor = self._checkpoint.tensor(name)  # a view of the mapping: nothing is read
        straight = (
            is_plain(tensor) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        )
        return entry if straight and tensor.nbytes == entry.nbytes else None

    def _blocks(self, name: str, entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
        """The values in order, one block after the other in the same memory, each with where it begins."""
        total, step = entry.nbytes // entry.dtype.itemsize, _WINDOW // entry.dtype.itemsize
        buffer = _memory(min(_WINDOW, entry.nbytes)).view(entry.dtype)
        for start in range(0, total, step):
            block = buffer[: min(step, total - start)]
            self._read(name, entry, start * entry.dtype.itemsize, block)
            yield start, block

    def _trim(self, nbytes: int) -> None:
        """Let the heap give holes back: what a transform returns lies between what it needed meanwhile."""
        self._since_trim += nbytes
        if self._since_trim > _WINDOW:
            self._since_trim = 0
            _malloc_trim(0)

    def _read(self, name: str, entry: Entry, skipped: int, into: torch.Tensor) -> None:
        if not into.numel():
            return
        memory = memoryview((ctypes.c_char * into.nbytes).from_address(into.data_ptr())).cast("B")
        done = 0
        try:
            file = self._file(entry.file)
            file.seek((entry.offset or 0) + skipped)
            while done < len(memory) and (got := file.readinto(memory[done:])):  # type: ignore[attr-defined]
                done += got
        except OSError as error:
            raise SourceError(
                f"{entry.file} cannot be read at {name}: {error.strerror or error}; "
                f"check the disk, or {AGAIN}"
            ) from error
        if done < len(memory):
            raise SourceError(
                f"{entry.file} has become shorter since it was opened: {name} ends "
                f"{len(memory) - done:,} bytes after its end; leave it alone while it is loaded, or {AGAIN}"
            )

    def _file(self, path: Path) -> BinaryIO:
        if path not in self._files:
            self._files[path] = self._open.enter_context(path.open("rb", buffering=0))
        return self._files[path]


def _memory(nbytes: int) -> torch.Tensor:
    """Bytes that go back to the system when they are let go.

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
        return left.device == right.device and torch.equal(_bytes(left.detach()), _bytes(right.detach()))
    one, other = taken_apart(left), taken_apart(right)
    if one is None or other is None:
        return left is right
    return one[0].keys() == other[0].keys() and all(_equal(one[0][key], other[0][key]) for key in one[0])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # so that NaN equals itself
