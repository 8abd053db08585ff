"""Writes safetensors files block by block: read, cast, summed, written, and read back if asked."""

from __future__ import annotations

import mmap
import os
import queue
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import torch

from dynswap_ext.checkpoint.writing.direct import DirectFile, align_up, page_buffer
from dynswap_ext.checkpoint.writing.layout import BLOCK, Layout
from dynswap_ext.checkpoint.writing.sources import scratch
from dynswap_ext.errors import SourceError

#: Threads, each with a block of its own at some stage: so reading, casting and writing overlap. Each has
#: 8 MiB of buffers, and that is all the memory that is taken.
_THREADS: Final = 4

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Block(NamedTuple):
    """A block of one of several files."""

    file: int
    number: int


class _Buffers(NamedTuple):
    read: mmap.mmap
    write: mmap.mmap


class BlockWriter:
    """The files of one checkpoint while they are written.

    Parameters
    ----------
    layouts
        What they shall be.
    paths
        Where, one for each.
    verify
        Read each block back from the disk and compare checksums.
    """

    def __init__(self, layouts: Sequence[Layout], paths: Sequence[Path], *, verify: bool) -> None:
        self._layouts, self._paths, self._verify = layouts, paths, verify
        self._buffers: queue.SimpleQueue[_Buffers] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put(_Buffers(scratch(), page_buffer(BLOCK)))

    def allocate(self) -> None:
        """Take the room: what is missing shows now and not in the middle, and threads need not wait for it.

        Raises
        ------
        OSError
            There is none.
        """
        for path, layout in zip(self._paths, self._layouts, strict=True):
            with DirectFile(path, write=True) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.descriptor, 0, align_up(layout.file_bytes))

    def all_blocks(self) -> Iterator[Block]:
        """Every block of every file, in order."""
        for file, layout in enumerate(self._layouts):
            for number in range(layout.blocks):
                yield Block(file, number)

    def present(self, known: dict[Block, int]) -> Generator[tuple[Block, int], None, None]:
        """Those of the known blocks whose bytes on the disk have the known checksum."""

        def look(item: tuple[Block, int]) -> tuple[Block, int] | None:
            block, checksum = item
            return item if self._on_disk(block) == checksum else None

        yield from (item for item in in_parallel(known.items(), look) if item is not None)

    def write(self, blocks: Iterable[Block]) -> Generator[tuple[Block, int], None, None]:
        """Write blocks; each one with its checksum as soon as it is done, in any order.

        Raises
        ------
        SourceError
            A tensor cannot be read, or what is read back is not what was written.
        """
        yield from in_parallel(blocks, self._write)

    def finish(self, checksums: dict[Block, int]) -> None:
        """Write the headers, and wait for the disks."""
        for at, (layout, path) in enumerate(zip(self._layouts, self._paths, strict=True)):
            sums = [checksums[Block(at, number)] for number in range(layout.blocks)]
            with path.open("rb+") as file:
                file.write(layout.header(sums))
                file.truncate(layout.file_bytes)  # the last block was written in whole pages
                file.flush()
                os.fsync(file.fileno())

    def _write(self, block: Block) -> tuple[Block, int]:
        layout, path = self._layouts[block.file], self._paths[block.file]
        begin, count = layout.block(block.number)
        buffers = self._buffers.get()
        try:
            for piece, low, high, start in layout.within(begin, begin + count):
                size = piece.dtype.itemsize
                into = torch.frombuffer(
                    buffers.write, dtype=piece.dtype, count=(high - low) // size, offset=low - begin
                )
                piece.source.read((low - start) // size, into, buffers.read)
            with memoryview(buffers.write) as view, view[:count] as written:
                checksum = zlib.crc32(written)
            with DirectFile(path, write=True) as file:
                file.write(layout.header_bytes + begin, align_up(count), buffers.write)
        finally:
            self._buffers.put(buffers)
        if self._verify and (found := self._on_disk(block)) != checksum:
            raise SourceError(
                f"{path} does not keep what is written to it: {count:,} bytes at "
                f"{layout.header_bytes + begin:,} have the checksum {found:08x} when they are read back, and "
                f"had {checksum:08x}; the disk or the memory is failing, so choose another"
            )
        return block, checksum

    def _on_disk(self, block: Block) -> int:
        layout, path = self._layouts[block.file], self._paths[block.file]
        begin, count = layout.block(block.number)
        buffers = self._buffers.get()
        try:
            with DirectFile(path) as file:
                return checksum_of(file, layout.header_bytes + begin, count, buffers.read)
        finally:
            self._buffers.put(buffers)


def checksum_of(file: DirectFile, begin: int, count: int, buffer: mmap.mmap) -> int:
    """CRC-32 of bytes on the disk."""
    at = file.read(begin, count, buffer)
    with memoryview(buffer) as view, view[at : at + count] as found:
        return zlib.crc32(found)


def in_parallel(items: Iterable[ItemT], work: Callable[[ItemT], ResultT]) -> Generator[ResultT, None, None]:
    """Results as they come. After an error no further item is begun."""
    pending: set[Future[ResultT]] = set()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dynswap-checkpoint") as pool:
        try:
            for item in items:
                pending.add(pool.submit(work, item))
                if len(pending) >= 2 * _THREADS:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            for future in pending:
                future.cancel()
