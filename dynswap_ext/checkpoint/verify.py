"""Compares a checkpoint with the checksums that were kept when it was written."""

from __future__ import annotations

import queue
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Final

from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.formats.common import listed
from dynswap_ext.checkpoint.writing.blocks import checksum_of, in_parallel
from dynswap_ext.checkpoint.writing.direct import ALIGNMENT, DirectFile, page_buffer
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.errors import SourceError

_LARGEST_BLOCK: Final = 64 << 20


def verify(path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> int:
    """Read a checkpoint that `save` or `convert` wrote, and compare its bytes with their checksums.

    Parameters
    ----------
    path
        A safetensors file, or what names several: an index or a folder.
    progress
        Called with the bytes that are done, and those of the file.

    Returns
    -------
    int
        How many bytes were compared.

    Raises
    ------
    SourceError
        A file has no checksums, or they differ. Names the file and the tensors.
    """
    return sum(_verify(file, progress) for file in open_checkpoint(Path(path)).files)


def _verify(path: Path, progress: Callable[[int, int], None] | None) -> int:
    checkpoint = open_checkpoint(path)
    begins = [entry.offset for entry in checkpoint.entries.values() if entry.offset is not None]
    end = max((entry.offset or 0) + entry.nbytes for entry in checkpoint.entries.values()) if begins else 0
    begin = min(begins, default=0)
    block, sums = _checksums(path, checkpoint.metadata.get(CHECKSUMS), end - begin)
    buffers: queue.SimpleQueue[object] = queue.SimpleQueue()

    with DirectFile(path) as file:

        def differs(index: int) -> int | None:
            at = begin + index * block
            buffer = page_buffer(block + 2 * ALIGNMENT) if buffers.empty() else buffers.get()
            try:
                return index if checksum_of(file, at, min(block, end - at), buffer) != sums[index] else None  # type: ignore[arg-type]
            finally:
                buffers.put(buffer)

        damaged: set[int] = set()
        for number, index in enumerate(in_parallel(range(len(sums)), differs), 1):
            damaged |= {index} - {None}  # type: ignore[arg-type]
            if progress is not None:
                progress(min(number * block, end - begin), end - begin)
    if damaged:
        names = [
            name
            for name, entry in checkpoint.entries.items()
            if any(
                begin + index * block < (entry.offset or 0) + entry.nbytes
                and (entry.offset or 0) < begin + (index + 1) * block
                for index in damaged
            )
        ]
        raise SourceError(
            f"{path} is not what was written: {len(damaged)} of {len(sums)} checksums differ, in the bytes "
            f"of {listed(names, 10)}; copy or "
            "convert it again"
        )
    return end - begin


def _checksums(path: Path, kept: str | None, size: int) -> tuple[int, list[int]]:
    """The size of a block, and the checksum of each."""
    if kept is None:
        raise SourceError(
            f"{path} has no checksums to compare with; only what dynswap_ext saved or converted has them"
        )
    try:
        first, *words = kept.split()
        block, sums = int(first), [int(word, 16) for word in words]
    except ValueError:
        block, sums = 0, []
    if not 0 < block <= _LARGEST_BLOCK or len(sums) != -(-size // block):
        raise SourceError(f"{path} has checksums that do not fit its tensors; copy or convert it again")
    return block, sums
