"""Writes safetensors files block by block: read, cast, summed, written, and read back if asked."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from dynswap_ext.checkpoint.writing.direct import DirectFile, align_up, thread_buffer
from dynswap_ext.checkpoint.writing.layout import Layout
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


class BlockWriter:
    """The files of one checkpoint while they are written, one for each layout.

    With `verify`, each block is read back from the disk and its checksum compared.
    """

    def __init__(self, layouts: Sequence[Layout], paths: Sequence[Path], *, verify: bool) -> None:
        self._layouts, self._paths, self._verify = layouts, paths, verify

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

    def present(self, known: dict[Block, int]) -> dict[Block, int]:
        """Return those of the known blocks whose bytes on the disk have the known checksum."""
        found = dict[Block, int]()
        blocks = (block for block in self.all_blocks() if block in known)
        in_parallel(blocks, lambda block: (block, self._on_disk(block)), lambda pair: found.update([pair]))
        return {block: checksum for block, checksum in found.items() if checksum == known[block]}

    def write(self, blocks: Iterable[Block], report: Callable[[Block, int], None]) -> None:
        """Write blocks, and report each with its checksum as soon as it is done, in any order.

        Raises
        ------
        SourceError
            A tensor cannot be read, or what is read back is not what was written.
        """
        in_parallel(blocks, self._write, lambda pair: report(*pair))

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
        buffer = thread_buffer("write")
        for piece, low, high, start in layout.within(begin, begin + count):
            size = piece.dtype.itemsize
            into = torch.frombuffer(buffer, dtype=piece.dtype, count=(high - low) // size, offset=low - begin)
            piece.source((low - start) // size, into)
        with memoryview(buffer) as view, view[:count] as written:
            checksum = zlib.crc32(written)
        with DirectFile(path, write=True) as file:
            file.write(layout.header_bytes + begin, align_up(count), buffer)
        if self._verify and (found := self._on_disk(block)) != checksum:
            raise SourceError(
                f"{path} does not keep what is written to it: {count:,} bytes at "
                f"{layout.header_bytes + begin:,} have the checksum {found:08x} when they are read back, and "
                f"had {checksum:08x}; the disk or the memory is failing, so choose another"
            )
        return block, checksum

    def _on_disk(self, block: Block) -> int:
        layout = self._layouts[block.file]
        begin, count = layout.block(block.number)
        with DirectFile(self._paths[block.file]) as file:
            return checksum_of(file, layout.header_bytes + begin, count)


def checksum_of(file: DirectFile, begin: int, count: int) -> int:
    """Return the CRC-32 of at most `BLOCK` bytes on the disk."""
    buffer = thread_buffer("read")
    at = file.read(begin, count, buffer)
    with memoryview(buffer) as view, view[at : at + count] as found:
        return zlib.crc32(found)


def in_parallel(
    items: Iterable[ItemT], work: Callable[[ItemT], ResultT], report: Callable[[ResultT], object]
) -> None:
    """Report results as they come. After an error no further item is begun."""
    waiting = iter(items)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dynswap-checkpoint") as pool:
        pending: set[Future[ResultT]] = set()
        try:
            while True:
                begun = islice(waiting, 2 * _THREADS - len(pending))
                pending.update(pool.submit(work, item) for item in begun)
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    report(future.result())
        finally:
            for future in pending:
                future.cancel()


# ---- what is done, kept between runs -----------------------------------------------------------------------


class Journal:
    """A file of lines: a conversion's description, then each finished block with its checksum.

    Lines are not forced to the disk: a line that is lost is work that is done again, and a block whose line
    is there is believed only if its bytes have that checksum.
    """

    def __init__(self, path: Path, job: Any, done: dict[Block, int]) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(job) + "\n")
        for block, checksum in done.items():
            self.add(block, checksum)

    @staticmethod
    def read(path: Path) -> tuple[Any, dict[Block, int]]:
        """Return the description, None if the process ended in the middle of it, and the blocks."""
        first, *lines = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        job, blocks = None, {}
        with suppress(ValueError):
            job = json.loads(first)
        for line in lines:
            with suppress(ValueError):
                file, number, checksum = map(int, line.split())
                blocks[Block(file, number)] = checksum
        return job, blocks

    def add(self, block: Block, checksum: int) -> None:
        """Note that a block is on the disk."""
        self._file.write(f"{block.file} {block.number} {checksum}\n")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
