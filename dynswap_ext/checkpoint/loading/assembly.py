"""Assembles tensors from ranges of files, by mapping the ranges one after the other.

Note [A fused weight is a mapping]: libraries fuse weights while they load a checkpoint: the matrices of
a layer's experts become one tensor. A copy in memory would be as large as most of the file. But any page
of a file can be mapped to any page of the address space. So the pages of the parts are mapped one after
the other, copy-on-write, and the result is a mapped master like any other: its bytes are read when they
are used, and forks, page-locking and write(2) work as usual. The page at a joint holds bytes of two
parts. It is written when the weight is assembled, which takes a page of memory for each part. Parts can
be mapped if their positions in the file and in the tensor are equal modulo a page, as those of large
matrices in one file are. Other parts (of a layer that continues in another shard) are copied.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dynswap_ext._util.file_mappings import FileMappings, private_pages
from dynswap_ext.checkpoint.formats.common import read_into, truncated
from dynswap_ext.checkpoint.formats.file_mapping import map_in_place, read_by_page, reserve
from dynswap_ext.checkpoint.loading.coded_files import coded_files
from dynswap_ext.lossless.tensor import LosslessTensor, encoded

_PAGE = mmap.PAGESIZE
#: Smaller tensors and parts, in bytes, are copied: most of their pages would be at joints.
_SMALLEST = 16 * _PAGE
_SMALLEST_PART = 4 * _PAGE
#: The name of a range of a file in errors.
_PART = "a part of a weight"
_CAT, _STACK = torch.ops.aten.cat.default, torch.ops.aten.stack.default


class Range(NamedTuple):
    """A range of bytes in a file. The inode tells the file from a later one of the same path."""

    path: Path
    inode: int
    offset: int
    nbytes: int

    def part(self, begin: int, nbytes: int) -> Range:
        """Return the range of `nbytes` bytes that begins `begin` bytes after this one."""
        return self._replace(offset=self.offset + begin, nbytes=nbytes)


class MappedFusion(TorchDispatchMode):
    """A context in which `torch.cat` and `torch.stack` of mapped tensors map their result instead of copying.

    If the result cannot be mapped, they copy as usual. Affects only the thread that has entered it. Meanwhile
    transformers reads entries that are coded without loss as the tensors that they stand for. What it fuses
    of them is coded again, in RAM: blocks of several tensors are none of one tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open = ExitStack()
        self._files: dict[tuple[Path, int], BinaryIO] = {}
        #: Results that were mapped, by the id of their storage: a reference, the address, and the parts.
        self._made: dict[int, tuple[StorageWeakRef, int, list[Range]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation. If it fuses mapped tensors, map its result if that is possible."""
        if func in (_CAT, _STACK) and not kwargs:
            fused = self._fused(args[0], args[1] if len(args) > 1 else 0, stacked=func is _STACK)
            if fused is not None:
                return fused
            if any(isinstance(part, LosslessTensor) for part in args[0]):
                return encoded(func(*args), origin="a weight that was fused of several")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._open.enter_context(coded_files())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Close the files. Tensors that were mapped stay valid."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()
        self._files.clear()
        self._made.clear()

    def _fused(self, tensors: Sequence[torch.Tensor], dim: int, *, stacked: bool) -> torch.Tensor | None:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        if sum(tensor.nbytes for tensor in tensors) < _SMALLEST:
            return None
        first = tensors[0]
        dimensions = first.dim() + stacked
        if not -dimensions <= dim < dimensions:
            return None
        dim %= dimensions
        for tensor in tensors:
            others = tensor.shape[:dim] + tensor.shape[dim + (not stacked) :]
            fits = others == first.shape[:dim] + first.shape[dim + (not stacked) :]
            if not fits or tensor.dtype != first.dtype or not tensor.is_contiguous():
                return None
        rows = prod(first.shape[:dim])
        if max(tensor.nbytes for tensor in tensors) // rows < _SMALLEST_PART:
            return None
        mappings = FileMappings()  # read anew each time, as addresses of unmapped files are used again
        ranges = [self._ranges(tensor, mappings) for tensor in tensors]
        if any(found is None for found in ranges):
            return None
        parts = [
            part
            for row in range(rows)
            for tensor, found in zip(tensors, ranges, strict=True)
            for part in _cut(found or [], row * (tensor.nbytes // rows), tensor.nbytes // rows)
        ]
        shape = list(first.shape)
        if stacked:
            shape.insert(dim, len(tensors))
        else:
            shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        joined = _joined(parts)
        if len(mappings) + len(joined) > _most_mappings() // 2:  # threads and libraries need some as well
            return None
        return self._assemble(joined, shape, first.dtype)

    def _ranges(self, tensor: torch.Tensor, mappings: FileMappings) -> list[Range] | None:
        """Return the file ranges of a contiguous tensor; None if it is not mapped, or was written to."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
            return None
        storage = tensor.untyped_storage()
        if storage.resizable() or tensor.is_inference() or tensor._version > 0:
            return None  # it is memory of torch's allocator, or may have been written to
        made = self._made.get(storage._cdata)
        if made is not None and not made[0].expired():  # type: ignore[no-untyped-call]
            return _cut(made[2], tensor.data_ptr() - made[1], tensor.nbytes)
        mapping = mappings.find(tensor.data_ptr())
        path = None if mapping is None else mapping.path
        if mapping is None or path is None or tensor.data_ptr() + tensor.nbytes > mapping.end:
            return None
        if any(private_pages(tensor.data_ptr(), tensor.nbytes)):  # `.data` and NumPy bump no version
            return None
        offset = mapping.offset_of(tensor.data_ptr())
        found = Range(path, mapping.inode, offset, tensor.nbytes)
        return [found] if os.fstat(self._file(found).fileno()).st_ino == mapping.inode else None

    def _assemble(self, parts: list[Range], shape: list[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Map the parts one after the other; None if too much of them would be copied."""
        nbytes = sum(part.nbytes for part in parts)
        places = list(accumulate((part.nbytes for part in parts), initial=0))
        phases: Counter[int] = Counter()
        for part, place in zip(parts, places, strict=False):
            phases[(part.offset - place) % _PAGE] += max(part.nbytes - _PAGE, 0)
        phase, mapped = phases.most_common(1)[0]
        if 2 * mapped < nbytes or phase % dtype.itemsize:
            return None
        memory = reserve(phase + nbytes)
        base = memory.data_ptr()
        copied: list[tuple[int, Range]] = []
        for number, (part, place) in enumerate(zip(parts, places, strict=False)):
            begin, end = phase + place, phase + place + part.nbytes
            if (part.offset - place) % _PAGE != phase:
                copied.append((begin, part))
                continue
            # Only whole pages can be mapped. The page at a joint is mapped with the part before it, and the
            # bytes of this part in it are copied. Nothing comes before the first part: its page is mapped.
            low = begin // _PAGE * _PAGE if number == 0 else min(-(-begin // _PAGE) * _PAGE, end)
            if begin < low:
                copied.append((begin, part.part(0, low - begin)))
            if low < end:
                high = -(-end // _PAGE) * _PAGE
                descriptor = self._file(part).fileno()
                map_in_place(part.path, descriptor, part.offset + low - begin, base + low, high - low)
        with read_by_page(memory):
            for begin, part in copied:
                read_into(self._file(part), part.path, part.offset, base + begin, part.nbytes, _PART)
        tensor = memory[phase : phase + nbytes].view(dtype).view(shape)
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._made[key] = StorageWeakRef(storage), tensor.data_ptr(), parts  # type: ignore[no-untyped-call]
        return tensor

    def _file(self, part: Range) -> BinaryIO:
        key = part.path, part.inode
        if key not in self._files:
            self._files[key] = self._open.enter_context(part.path.open("rb"))
            os.posix_fadvise(self._files[key].fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file = self._files[key]
        end, size = part.offset + part.nbytes, os.fstat(file.fileno()).st_size
        if end > size:
            raise truncated(part.path, end, size, _PART)
        return file


def _cut(ranges: Iterable[Range], begin: int, nbytes: int) -> list[Range]:
    """Return the ranges of `nbytes` bytes from `begin` on, counted over all of the ranges in order."""
    found: list[Range] = []
    at, end = 0, begin + nbytes
    for part in ranges:
        low, high = max(at, begin), min(at + part.nbytes, end)
        if low < high:
            found.append(part.part(low - at, high - low))
        at += part.nbytes
    return found


def _joined(parts: Iterable[Range]) -> list[Range]:
    """Join neighbouring parts of a weight that are neighbours in their file, too."""
    joined: list[Range] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.part(last.nbytes, part.nbytes) == part:
            joined[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
        else:
            joined.append(part)
    return joined


def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530  # Linux's default
