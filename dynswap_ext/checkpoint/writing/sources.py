"""Makes functions that read a tensor which is to be written, from a range of a file or from memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import torch

from dynswap_ext._util.file_mappings import FileMappings, Mapping, private_pages
from dynswap_ext.checkpoint.writing.direct import BLOCK, Files, thread_buffer
from dynswap_ext.lossless.tensor import LosslessTensor

#: A function ``source(first, into)`` that may be called from several threads. It fills `into`, a tensor of
#: one dimension, with elements of another tensor, in row-major order from element `first` on, and casts them
#: to the dtype of `into`. It raises SourceError if it cannot read them.
Source: TypeAlias = Callable[[int, torch.Tensor], None]

#: Elements that are cast at a time: with more, torch starts a team of threads for each thread that calls.
_AT_ONCE: Final = 32768

_PAGE: Final = mmap.PAGESIZE
_MADV_PAGEOUT: Final = 21


def source_of(tensor: torch.Tensor, mappings: FileMappings, files: Files) -> Source:
    """Return a source for a tensor. Reading it leaves no more of the tensor in memory than there is now."""
    on_host = tensor.device.type == "cpu" and tensor.numel() > 0
    mapped = mappings.overlapping(tensor.data_ptr(), tensor.nbytes) if on_host else []
    if not mapped:
        return from_tensor(lambda: tensor)
    as_stored = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    borders = [at for found in mapped for at in (found.begin, found.end, _end_of_file(found))]
    joints = {max(min(at, end), begin) - begin for at in borders}
    cuts = sorted(at // tensor.itemsize for at in joints | {0, tensor.nbytes})
    if len(cuts) > 2 and as_stored and not any(at % tensor.itemsize for at in joints):
        flat = tensor.reshape(-1)
        pieces = [(low, high, source_of(flat[low:high], mappings, files)) for low, high in pairwise(cuts)]
        return _concatenated(pieces)
    mapping = mapped[0]
    path = mapping.path
    if (
        path is None
        or not as_stored
        or begin < mapping.begin
        or end > mapping.end
        or begin >= _end_of_file(mapping)
        or os.fstat(files[path].descriptor).st_ino != mapping.inode  # the file was replaced
    ):
        return from_tensor(lambda: tensor, mapped=True)
    return from_file(files, path, mapping.offset_of(begin), tensor.dtype, over=tensor)


def _end_of_file(mapping: Mapping) -> int:
    """Return the address in a mapping where bytes of the file end, and bytes that were only written follow.

    The rest of the page with the end of the file is memory. A fused weight may continue there with its next
    part (Note [A fused weight is a mapping]). If that page was not written to, the mapping's end is returned.
    """
    try:
        size = os.stat(mapping.name).st_size
    except OSError:
        return mapping.end
    end = mapping.begin + size - mapping.offset
    rest = -end % _PAGE
    if not mapping.begin < end < mapping.end or not rest or not any(private_pages(end, rest)):
        return mapping.end
    return end


def _concatenated(pieces: list[tuple[int, int, Source]]) -> Source:
    """Return a source for a tensor of several pieces. Each is (first element, end, its source)."""

    def read(first: int, into: torch.Tensor) -> None:
        for low, high, source in pieces:
            begin, end = max(low, first), min(high, first + into.numel())
            if begin < end:
                source(begin - low, into[begin - first : end - first])

    return read


def from_file(
    files: Files, path: Path, offset: int, dtype: torch.dtype, over: torch.Tensor | None = None
) -> Source:
    """Return a source for a contiguous tensor that is a range of a file.

    `over` is a tensor over a private mapping of that range, if there is one. Then the result has what was
    written to it: those pages are private to the process, and are copied over the bytes of the file. Other
    pages are not read through the mapping, as they would stay in this process's memory.
    """

    def read(first: int, into: torch.Tensor) -> None:
        buffer, size = thread_buffer("read"), dtype.itemsize
        step = BLOCK // size
        for done in range(0, into.numel(), step):
            count, begin = min(step, into.numel() - done), (first + done) * size
            at = files[path].read(offset + begin, count * size, buffer)
            if over is not None:
                address = over.data_ptr() + begin
                target = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + at
                for start, end in private_pages(address, count * size):
                    ctypes.memmove(target + start - address, start, end - start)
            part = into[done : done + count]
            if dtype == into.dtype:  # copy bytes, so that a NaN keeps its bits
                part, of_file = part.view(torch.uint8), torch.uint8
            else:
                of_file = dtype
            _copy(part, torch.frombuffer(buffer, dtype=of_file, count=part.numel(), offset=at))

    return read


def from_tensor(tensor_of: Callable[[], torch.Tensor], *, mapped: bool = False) -> Source:
    """Return a source for the tensor that `tensor_of` returns, plain or coded, on any device, of any strides.

    If the tensor is contiguous and `mapped`, the pages that were read are given back to the system.
    """

    def read(first: int, into: torch.Tensor) -> None:
        tensor = tensor_of()
        if not tensor.is_contiguous():
            _gather(into, tensor, first)
            return
        values = tensor.reshape(-1)[first : first + into.numel()]
        _copy(into, values.decoded() if isinstance(values, LosslessTensor) else values)
        if mapped:
            size = tensor.element_size()
            _release_pages(tensor.data_ptr() + first * size, into.numel() * size)

    return read


class Latest:
    """Makes tensors by name, and keeps the last one, as its blocks are asked for one after the other."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._kept: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """Return the tensor of this name, which is made unless it is the last one."""
        with self._lock:
            if self._kept is None or self._kept[0] != name:
                self._kept = None  # frees the last one before the next is made
                self._kept = name, self._make(name).detach()
            return self._kept[1]


def _release_pages(address: int, count: int) -> None:
    """Give the pages of a range back to the system.

    Uses MADV_PAGEOUT, as MADV_DONTNEED would lose what was written to a private mapping.
    """
    first, last = -(-address // _PAGE) * _PAGE, (address + count) // _PAGE * _PAGE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    if into.dtype == values.dtype or values.device.type != "cpu":
        into.copy_(values)
        return
    for begin in range(0, into.numel(), _AT_ONCE):
        into[begin : begin + _AT_ONCE].copy_(values[begin : begin + _AT_ONCE])


def _gather(into: torch.Tensor, tensor: torch.Tensor, first: int) -> None:
    """Copy elements of a tensor that is not contiguous, from `first` on, without a copy of all of it."""
    row, done = tensor[0].numel(), 0
    most = max(1, BLOCK // (row * tensor.element_size()))
    while done < into.numel():
        index, skipped = divmod(first + done, row)
        whole = 0 if skipped else min(most, (into.numel() - done) // row)
        part = into[done : done + (whole * row or row - skipped)]
        if whole:
            _copy(part, tensor[index : index + whole].reshape(-1))
        else:
            _gather(part, tensor[index], skipped)
        done += part.numel()
