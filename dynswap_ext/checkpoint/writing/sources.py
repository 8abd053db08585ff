"""Where the bytes of a tensor that is being written come from: a range of a file, or memory."""

from __future__ import annotations

import array
import bisect
import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from dynswap_ext._mappings import mappings
from dynswap_ext.checkpoint.writing.direct import ALIGNMENT, DirectFile, page_buffer

#: Bytes that are read from a file at a time.
WINDOW: Final = 4 << 20
#: Elements that are cast at a time: with more, torch starts a team of threads for each thread that calls.
_AT_ONCE: Final = 32768

_PAGE: Final = mmap.PAGESIZE
# Of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
_HERE: Final = 1 << 63 | 1 << 62  # present, or swapped
_OF_FILE: Final = 1 << 61
_MADV_PAGEOUT: Final = 21


def scratch() -> mmap.mmap:
    """A buffer for one thread's reads."""
    return page_buffer(WINDOW + 2 * ALIGNMENT)


class Source(ABC):
    """The elements of one tensor, in the order of a contiguous one. Read from several threads."""

    @abstractmethod
    def read(self, first: int, into: torch.Tensor, buffer: mmap.mmap) -> None:
        """Fill `into` (one dimension) with the elements from `first` on, cast to its dtype.

        Raises
        ------
        SourceError
            They cannot be read.
        """


class Files:
    """Files that are open for reading, each once."""

    def __init__(self) -> None:
        self._open: dict[Path, DirectFile] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> DirectFile:
        with self._lock:
            if path not in self._open:
                self._open[path] = DirectFile(path)
            return self._open[path]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


class FileRange(Source):
    """A contiguous tensor in a file."""

    def __init__(self, files: Files, path: Path, offset: int, dtype: torch.dtype) -> None:
        self._files, self._path, self._offset, self._dtype = files, path, offset, dtype

    def read(self, first: int, into: torch.Tensor, buffer: mmap.mmap) -> None:
        """See `Source.read`."""
        file, size = self._files[self._path], self._dtype.itemsize
        step = WINDOW // size
        for done in range(0, into.numel(), step):
            count = min(step, into.numel() - done)
            begin = (first + done) * size
            at = file.read(self._offset + begin, count * size, buffer)
            self._correct(begin, count * size, buffer, at)
            _put(into[done : done + count], buffer, at, self._dtype)

    def _correct(self, begin: int, count: int, buffer: mmap.mmap, at: int) -> None:
        """What the file has is what the tensor has."""


class MappedMaster(FileRange):
    """A contiguous tensor over a private mapping, whose owner may have written to some pages.

    It is read from the file, since pages that are read through a mapping stay in this process's memory;
    what was written lies in pages of this process's own, which are laid over it.
    """

    def __init__(self, files: Files, path: Path, offset: int, tensor: torch.Tensor) -> None:
        super().__init__(files, path, offset, tensor.dtype)
        self._tensor = tensor

    def _correct(self, begin: int, count: int, buffer: mmap.mmap, at: int) -> None:
        address = self._tensor.data_ptr() + begin
        target = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + at
        for start, end in _private_pages(address, count):
            ctypes.memmove(target + start - address, start, end - start)


class TensorRange(Source):
    """Any other tensor of plain elements, on any device and with any strides."""

    def __init__(self, tensor: torch.Tensor, *, mapped: bool = False) -> None:
        self._tensor, self._mapped = tensor, mapped

    def read(self, first: int, into: torch.Tensor, buffer: mmap.mmap) -> None:
        """See `Source.read`."""
        done = 0
        for part in _flat(self._tensor, first, first + into.numel()):
            _copy(into[done : done + part.numel()], part)
            done += part.numel()
        if self._mapped and self._tensor.is_contiguous():
            size = self._tensor.element_size()
            _let_pages_go(self._tensor.data_ptr() + first * size, into.numel() * size)


class Assembled(Source):
    """A tensor that a checkpoint puts together anew each time it is asked for."""

    def __init__(self, make: Callable[[], torch.Tensor], latest: Latest) -> None:
        self._make, self._latest = make, latest

    def read(self, first: int, into: torch.Tensor, buffer: mmap.mmap) -> None:
        """See `Source.read`."""
        TensorRange(self._latest.get(self._make)).read(first, into, buffer)


class Latest:
    """The one tensor that was put together last, as blocks are asked for in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Callable[[], torch.Tensor], torch.Tensor] | None = None

    def get(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor; made if it is not the last one."""
        with self._lock:
            if self._kept is None or self._kept[0] is not make:
                self._kept = None  # not both at once
                self._kept = make, make()
            return self._kept[1]


class Place(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    inode: int


@dataclass(frozen=True)
class _Mapping:
    begin: int
    end: int
    offset: int
    inode: int
    #: None where the file has another name by now, or none.
    path: Path | None


class Mappings:
    """The mappings of files that this process has, as they are now."""

    def __init__(self) -> None:
        self._all = _mappings()
        self._begins = [mapping.begin for mapping in self._all]

    def find(self, tensor: torch.Tensor) -> tuple[bool, Place | None]:
        """Whether a tensor's first byte is in a mapped file; and where, if all of it can be read there."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return False, None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._all[at].end:
            return False, None
        mapping = self._all[at]
        whole = tensor.is_contiguous() and address + tensor.nbytes <= mapping.end
        if mapping.path is None or not whole:
            return True, None
        return True, Place(mapping.path, mapping.offset + address - mapping.begin, mapping.inode)


def source_of(tensor: torch.Tensor, mappings: Mappings, files: Files) -> Source:
    """How to read a tensor without keeping more of it in memory than there is of it now."""
    mapped, place = mappings.find(tensor)
    if place is not None and os.fstat(files[place.path].descriptor).st_ino != place.inode:
        place = None  # it was replaced just now
    if place is None or tensor.is_conj() or tensor.is_neg():
        return TensorRange(tensor, mapped=mapped)
    return MappedMaster(files, place.path, place.offset, tensor)


def _mappings() -> list[_Mapping]:
    found: list[_Mapping] = []
    known: dict[tuple[str, int], Path | None] = {}
    for begin, end, offset, device, inode, name in mappings():
        if inode == 0:
            continue
        if name.endswith("(deleted)") and name.startswith(("/dev/", "/memfd:", "/SYSV")):
            continue  # shared memory
        key = name, inode
        if key not in known:
            known[key] = _if_same_file(Path(name), device, inode)
        last = found[-1] if found else None
        if last and last.inode == inode and last.end == begin and offset - last.offset == begin - last.begin:
            found[-1] = _Mapping(last.begin, end, last.offset, inode, last.path)  # the kernel splits them
        else:
            found.append(_Mapping(begin, end, offset, inode, known[key]))
    return found


def _if_same_file(path: Path, device: str, inode: int) -> Path | None:
    """The path, if what is mapped from it is still there."""
    try:
        status = path.stat()
    except OSError:
        return None
    same = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}" == device
    return path if same and status.st_ino == inode and os.access(path, os.R_OK) else None


def _private_pages(address: int, count: int) -> Iterator[tuple[int, int]]:
    """Ranges of addresses that are this process's own memory and not the file's."""
    first, last = address // _PAGE, -(-(address + count) // _PAGE)
    entries = array.array("Q")
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * entries.itemsize)
            entries.frombytes(pagemap.read((last - first) * entries.itemsize))
    except OSError:  # a container may hide it: then any page may be
        yield address, address + count
        return
    for page, entry in enumerate(entries, first):
        if entry & _HERE and not entry & _OF_FILE:
            yield max(page * _PAGE, address), min((page + 1) * _PAGE, address + count)


def _let_pages_go(address: int, count: int) -> None:
    """Unlike MADV_DONTNEED this loses nothing that was written to a private mapping."""
    first, last = -(-address // _PAGE) * _PAGE, (address + count) // _PAGE * _PAGE
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)


def _put(into: torch.Tensor, buffer: mmap.mmap, at: int, dtype: torch.dtype) -> None:
    if dtype == into.dtype:
        into, dtype = into.view(torch.uint8), torch.uint8  # as they are, whatever bits a NaN has
    _copy(into, torch.frombuffer(buffer, dtype=dtype, count=into.numel(), offset=at))


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    if into.dtype == values.dtype or values.device.type != "cpu":
        into.copy_(values)
        return
    for begin in range(0, into.numel(), _AT_ONCE):
        into[begin : begin + _AT_ONCE].copy_(values[begin : begin + _AT_ONCE])


def _flat(tensor: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Elements of the flattened tensor, without a copy of all of it."""
    if begin >= end:
        return
    if tensor.is_contiguous() or tensor.dim() <= 1:
        yield tensor.reshape(-1)[begin:end]
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        yield from _flat(tensor[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _flat(tensor[first - 1], begin - (first - 1) * row, row)
    step = max(1, WINDOW // (row * tensor.element_size()))
    for at in range(first, last, step):
        yield tensor[at : min(at + step, last)].reshape(-1)
    if end > last * row:
        yield from _flat(tensor[last], 0, end - last * row)
