"""Where the bytes of a tensor that is being written come from: a range of a file, or memory."""

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

#: Called as ``source(first, into)``, from several threads: it fills `into` (one dimension) with elements of a
#: tensor, from `first` on in the order of a contiguous one, cast to its dtype, or raises SourceError.
Source: TypeAlias = Callable[[int, torch.Tensor], None]

#: Elements that are cast at a time: with more, torch starts a team of threads for each thread that calls.
_AT_ONCE: Final = 32768

_PAGE: Final = mmap.PAGESIZE
_MADV_PAGEOUT: Final = 21


def source_of(tensor: torch.Tensor, mappings: FileMappings, files: Files) -> Source:
    """Return how to read a tensor without keeping more of it in memory than there is of it now."""
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
        or os.fstat(files[path].descriptor).st_ino != mapping.inode  # it was replaced just now
    ):
        return from_tensor(lambda: tensor, mapped=True)
    return from_file(files, path, mapping.offset_of(begin), tensor.dtype, over=tensor)


def _end_of_file(mapping: Mapping) -> int:
    """Return the address at which the file's bytes end in a mapping.

    What follows in the page that has the file's end is memory. A fused weight may go on there, with its next
    part (Note [A fused weight is a mapping]); then that page has been written.
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
    """Return a source that reads pieces one after the other; each is (first element, end, its source)."""

    def read(first: int, into: torch.Tensor) -> None:
        for low, high, source in pieces:
            begin, end = max(low, first), min(high, first + into.numel())
            if begin < end:
                source(begin - low, into[begin - first : end - first])

    return read


def from_file(
    files: Files, path: Path, offset: int, dtype: torch.dtype, over: torch.Tensor | None = None
) -> Source:
    """Return how to read a contiguous tensor in a file.

    With `over`, a tensor over a private mapping of that range, what its owner has written is read as well. It
    is read from the file all the same, since pages that are read through a mapping stay in this process's
    memory; what was written is in pages of this process's own, which are laid over it.
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
            if dtype == into.dtype:  # as the bytes are, whatever bits a NaN has
                part, of_file = part.view(torch.uint8), torch.uint8
            else:
                of_file = dtype
            _copy(part, torch.frombuffer(buffer, dtype=of_file, count=part.numel(), offset=at))

    return read


def from_tensor(tensor_of: Callable[[], torch.Tensor], *, mapped: bool = False) -> Source:
    """Return how to read any tensor of plain elements, on any device and with any strides."""

    def read(first: int, into: torch.Tensor) -> None:
        tensor = tensor_of()
        if not tensor.is_contiguous():
            _gather(into, tensor, first)
            return
        _copy(into, tensor.reshape(-1)[first : first + into.numel()])
        if mapped:
            size = tensor.element_size()
            _release_pages(tensor.data_ptr() + first * size, into.numel() * size)

    return read


class Latest:
    """Keeps the one tensor that was put together last, as blocks are asked for in order."""

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._kept: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        """Return the tensor; made if it is not the last one."""
        with self._lock:
            if self._kept is None or self._kept[0] != name:
                self._kept = None  # not both at once
                self._kept = name, self._make(name).detach()
            return self._kept[1]


def _release_pages(address: int, count: int) -> None:
    """Give pages back. Unlike MADV_DONTNEED this loses nothing that was written to a private mapping."""
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
    """Copy elements of a tensor that is not contiguous, without a contiguous copy of all of it."""
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
