"""Writes the files of a checkpoint block by block, on several threads.

Each block is read, cast, checksummed and written. A conversion also reads it back, and notes it in a journal,
so that a later call can go on after an error or a crash.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from dynswap_ext._util.progress import ProgressCallback
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.checkpoint.writing.direct import BLOCK, DirectFile, align_up, thread_buffer
from dynswap_ext.checkpoint.writing.layout import Layout
from dynswap_ext.checkpoint.writing.target import SUFFIX, Target, sync
from dynswap_ext.errors import ConfigError, SourceError

#: Threads that each take one block through all steps, so that reading, casting and writing overlap. A thread
#: has 8 MiB of buffers, which is all the memory that is needed.
_THREADS: Final = 4

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Block(NamedTuple):
    """A range of a file that has one checksum."""

    path: Path
    begin: int
    nbytes: int

    @property
    def key(self) -> str:
        """The name of the block in the journal: its file's name, and its first byte."""
        return f"{self.path.name} {self.begin}"

    def checksum(self) -> int:
        """Read the block from the disk, and return its CRC-32."""
        buffer = thread_buffer("read")
        with DirectFile(self.path) as file:
            at = file.read(self.begin, self.nbytes, buffer)
        return _crc(buffer, at, self.nbytes)

    def write(self, layout: Layout, *, verify: bool) -> int:
        """Write the block, and return its CRC-32. With `verify`, read it back; SourceError if it differs."""
        buffer = thread_buffer("write")
        layout.fill(buffer, self.begin, self.nbytes)
        checksum = _crc(buffer, 0, self.nbytes)
        with DirectFile(self.path, write=True) as file:
            file.write(self.begin, align_up(self.nbytes), buffer)
        if verify and (found := self.checksum()) != checksum:
            raise SourceError(
                f"{self.path} does not keep what is written to it: {self.nbytes:,} bytes at {self.begin:,} "
                f"have the checksum {found:08x} when they are read back, and had {checksum:08x}; the disk or "
                "the memory is failing, so choose another"
            )
        return checksum


def _crc(buffer: mmap.mmap, begin: int, nbytes: int) -> int:
    with memoryview(buffer) as view, view[begin : begin + nbytes] as part:
        return zlib.crc32(part)


def blocks_of(path: Path, begin: int, end: int) -> list[Block]:
    """Return the blocks of a file whose tensors lie from byte `begin` to byte `end`."""
    return [Block(path, at, min(BLOCK, end - at)) for at in range(begin, end, BLOCK)]


def in_parallel(
    work: Callable[[ItemT], ResultT],
    items: Iterable[ItemT],
    report: Callable[[ItemT, ResultT], object],
) -> None:
    """Call `work` for each item on several threads, and `report` for each item and result on this one.

    After an error no further item is begun.
    """
    waiting = iter(items)
    pending: dict[Future[ResultT], ItemT] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dynswap-checkpoint") as pool:
        try:
            while True:
                begun = islice(waiting, 2 * _THREADS - len(pending))
                pending.update((pool.submit(work, item), item) for item in begun)
                if not pending:
                    return
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    report(pending.pop(future), future.result())
        finally:
            for future in pending:
                future.cancel()


def write(
    target: Target,
    layouts: Sequence[Layout],
    progress: ProgressCallback | None = None,
    *,
    source: Checkpoint | None = None,
    overwrite: bool = False,
) -> tuple[Path, list[Path], int]:
    """Write the files of a checkpoint, and replace the previous one when the new one is complete.

    For a conversion, `source` is the checkpoint that is converted. Then each block is read back, and after an
    error or a crash, the next call for the same source and layouts goes on. For that, a journal has a line
    that describes the job, and a line for each block that is done. Lines are not forced to the disk. If one
    is lost, its block is written again; if one is there, the block must still have its checksum.

    Returns the path to load, the files, and the bytes that an earlier call had written. Raises ConfigError
    for another unfinished job, unless `overwrite`, and SourceError if the source or the disk fails.
    """
    needed = sum(layout.file_bytes for layout in layouts)
    whole = sum(layout.data_bytes for layout in layouts)
    files = {target.partial / f"{at:05d}{SUFFIX}": layout for at, layout in enumerate(layouts, 1)}
    blocks = [
        block
        for path, layout in files.items()
        for block in blocks_of(path, layout.header_bytes, layout.file_bytes)
    ]
    job = None if source is None else _job(source, layouts)
    report = progress or (lambda done, whole: None)
    with target.reserved(needed):
        noted = {} if job is None else _noted(target, job, overwrite)
        target.make_room(needed, keep=bool(noted))
        for path, layout in files.items():  # a disk that is too full fails here, and not in the middle
            with DirectFile(path, write=True) as file:
                os.posix_fallocate(file.descriptor, 0, align_up(layout.file_bytes))
        found: dict[Block, int] = {}
        in_parallel(Block.checksum, [block for block in blocks if block.key in noted], found.__setitem__)
        done = {block: checksum for block, checksum in found.items() if noted[block.key] == str(checksum)}
        resumed = position = sum(block.nbytes for block in done)
        try:
            with open(target.journal if job else os.devnull, "w", buffering=1) as journal:

                def finished(block: Block, checksum: int) -> None:
                    nonlocal position
                    done[block] = checksum
                    print(block.key, checksum, file=journal)
                    position += block.nbytes
                    report(position, whole)

                print(json.dumps(job), file=journal)
                for block, checksum in done.items():
                    print(block.key, checksum, file=journal)
                report(position, whole)
                in_parallel(
                    lambda block: block.write(files[block.path], verify=job is not None),
                    [block for block in blocks if block not in done],
                    finished,
                )
            if source is not None and job != _job(source, layouts):
                done.clear()
                raise SourceError(
                    f"{source.path} has changed while it was converted; convert it again when no program "
                    "writes to it"
                )
            _write_headers(files, (done[block] for block in blocks))
            placed = target.place(files)
            done.clear()
        finally:
            if not done:  # the job is complete, or nothing is done that a later call could use
                target.journal.unlink(missing_ok=True)
    return (*placed, resumed)


def _job(source: Checkpoint, layouts: Sequence[Layout]) -> Any:
    """Describe the job by its source and its files' headers. A call continues only a job that is equal."""
    stamps = []
    for path in source.files:
        try:
            status = path.stat()
        except OSError as error:
            raise SourceError(f"{path} cannot be read any more: {error.strerror}") from error
        stamps.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    headers = b"".join(layout.header([0] * layout.blocks) for layout in layouts)
    return {"source": stamps, "plan": hashlib.sha256(headers).hexdigest()}


def _noted(target: Target, job: Any, overwrite: bool) -> dict[str, str]:
    """Return the checksum of each block in the journal of an earlier call, if that had the same job.

    ConfigError if it had another one, unless `overwrite`.
    """
    try:
        first, *lines = target.journal.read_text(encoding="utf-8", errors="replace").splitlines()
        earlier = json.loads(first)
    except (FileNotFoundError, ValueError):
        return {}  # there is no journal, or its first line is incomplete
    noted = {key: checksum for key, _, checksum in (line.rpartition(" ") for line in lines)}
    if earlier == job:
        return noted
    if noted and not overwrite:
        raise ConfigError(
            f"{target.partial} has a part of {target.path} from another source, one that has changed since, "
            "or with other arguments; repeat those to continue, delete the folder, or overwrite "
            "(--overwrite, overwrite=True) to start afresh"
        )
    return {}


def _write_headers(files: Mapping[Path, Layout], checksums: Iterator[int]) -> None:
    """Write the headers, with the blocks' checksums in order, and wait until the disk has the files."""
    for path, layout in files.items():
        with path.open("rb+") as file:
            file.write(layout.header(list(islice(checksums, layout.blocks))))
            file.truncate(layout.file_bytes)  # the last block was written in whole pages
        sync(path)
