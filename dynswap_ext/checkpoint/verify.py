"""Compares a checkpoint with the checksums that `save` or `convert` has put into its header."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from dynswap_ext._util.listing import listed
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.writing.blocks import Block, blocks_of, in_parallel
from dynswap_ext.checkpoint.writing.direct import BLOCK
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.errors import SourceError


def verify(path: str | PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> int:
    """Read a checkpoint that `save` or `convert` wrote, and compare its bytes with their checksums.

    Parameters
    ----------
    path
        A safetensors file, an index of several, or their folder.
    progress
        Called with the bytes of a file that have been compared, and the bytes of its tensors. Files are
        compared one after the other.

    Returns
    -------
    int
        The number of bytes that were compared.

    Raises
    ------
    SourceError
        A file cannot be read, has no checksums, or has other bytes. Names the file and the tensors.
    """
    whole = open_checkpoint(Path(path))
    files = whole.files if CHECKSUMS in whole.metadata else [whole.path]
    return sum(_verify(file, progress) for file in files)


def _verify(path: Path, progress: Callable[[int, int], None] | None) -> int:
    checkpoint = open_checkpoint(path)
    places = {name: (entry.offset or 0, entry.nbytes) for name, entry in checkpoint.entries.items()}
    begin = min((offset for offset, _ in places.values()), default=0)
    end = max((offset + nbytes for offset, nbytes in places.values()), default=0)
    blocks = blocks_of(path, begin, end)
    kept = checkpoint.metadata.get(CHECKSUMS)
    if kept is None:
        raise SourceError(
            f"{path} has no checksums to compare with; only what dynswap_ext saved or converted has them"
        )
    size, *sums = kept.split() or [""]
    if size != str(BLOCK) or len(sums) != len(blocks):
        raise SourceError(f"{path} has checksums that do not fit its tensors; copy or convert it again")
    damaged: list[Block] = []
    done = 0

    def compare(block: Block, checksum: int) -> None:
        nonlocal done
        done += block.nbytes
        if f"{checksum:08x}" != sums[(block.begin - begin) // BLOCK]:
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
