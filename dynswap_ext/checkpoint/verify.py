"""Compares a checkpoint with the checksums that were kept when it was written."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.formats.common import listed
from dynswap_ext.checkpoint.writing.blocks import Block, blocks_of, in_parallel
from dynswap_ext.checkpoint.writing.direct import BLOCK
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.errors import SourceError


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
    places = {name: (entry.offset or 0, entry.nbytes) for name, entry in checkpoint.entries.items()}
    begin = min((offset for offset, _ in places.values()), default=0)
    end = max((offset + nbytes for offset, nbytes in places.values()), default=0)
    blocks = blocks_of(path, begin, end)
    sums = _checksums(path, checkpoint.metadata.get(CHECKSUMS), len(blocks))
    damaged: list[Block] = []
    done = 0

    def compare(block: Block, checksum: int) -> None:
        nonlocal done
        done += block.nbytes
        if checksum != sums[(block.begin - begin) // BLOCK]:
            damaged.append(block)
        if progress is not None:
            progress(done, end - begin)

    in_parallel(Block.checksum, blocks, compare)
    if damaged:
        names = [
            name
            for name, (offset, nbytes) in places.items()
            if any(block.begin < offset + nbytes and offset < block.begin + block.nbytes for block in damaged)
        ]
        raise SourceError(
            f"{path} is not what was written: {len(damaged)} of {len(sums)} checksums differ, in the bytes "
            f"of {listed(names, 10)}; copy or convert it again"
        )
    return end - begin


def _checksums(path: Path, kept: str | None, count: int) -> list[int]:
    if kept is None:
        raise SourceError(
            f"{path} has no checksums to compare with; only what dynswap_ext saved or converted has them"
        )
    try:
        block, *sums = kept.split()
        if int(block) == BLOCK and len(sums) == count:
            return [int(word, 16) for word in sums]
    except ValueError:
        pass
    raise SourceError(f"{path} has checksums that do not fit its tensors; copy or convert it again")
