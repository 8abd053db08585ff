"""Decides which tensors go into which safetensors file, and where in it."""

from __future__ import annotations

import json
import math
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch

from dynswap_ext.checkpoint.formats.safetensors_file import CODED, DTYPES, VERSION
from dynswap_ext.checkpoint.writing.direct import BLOCK, align_up
from dynswap_ext.checkpoint.writing.sources import Source
from dynswap_ext.errors import ConfigError
from dynswap_ext.lossless.code import UNIT

#: Tensors begin at a multiple of this, a cache line, if possible. Vector instructions ask for no more.
_TENSOR_ALIGNMENT: Final = 64
#: The key of a file's metadata that has the size of its blocks, and the checksum of each.
CHECKSUMS: Final = "dynswap.crc32"
#: Safetensors' names of torch's dtypes.
_TAGS: Final = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """One tensor to be written to a safetensors file.

    Raises
    ------
    ConfigError
        Safetensors does not have its dtype.
    """

    #: The name of the entry, and then other names of the same tensor, which go into the metadata.
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Source
    #: If the bytes are the lossless code of a tensor, the dtype and the shape of that.
    coded: tuple[torch.dtype, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _TAGS:
            raise ConfigError(
                f"{self.names[0]} is {self.dtype}, which the safetensors format has no name for; cast it, or "
                "save to a path that ends in .pt"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the tensor when it is decoded."""
        dtype, shape = self.coded or (self.dtype, self.shape)
        return math.prod(shape) * dtype.itemsize

    @property
    def alignment(self) -> int:
        """What the size is a multiple of in any case: an element, or 16 bytes if the tensor is coded."""
        return UNIT if self.coded else self.dtype.itemsize


class Layout:
    """One safetensors file: a header that fills whole pages, then the tensors without gaps.

    The format allows no gaps. So tensors whose size is a multiple of 64 bytes come first, and each begins at
    a multiple of 64. The others follow: first coded ones, which take multiples of 16 bytes and begin at one,
    then those with the largest elements first, so that each begins at a multiple of its element's size.
    Otherwise the order is that of the pieces, which is roughly the order of use.

    The checksums are in the header's metadata. The length of the header only depends on their number.
    """

    def __init__(self, pieces: Iterable[Piece], metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self.pieces = sorted(
            pieces,
            key=lambda piece: (bool(piece.coded or piece.nbytes % _TENSOR_ALIGNMENT), -piece.alignment),
        )
        *self.offsets, self.data_bytes = accumulate((piece.nbytes for piece in self.pieces), initial=0)
        self.blocks = -(-self.data_bytes // BLOCK)  # the last may be shorter
        self.header_bytes = len(self.header([0] * self.blocks))
        self.file_bytes = self.header_bytes + self.data_bytes

    def fill(self, buffer: mmap.mmap, begin: int, count: int) -> None:
        """Read the `count` bytes that the file will have from `begin` on, after its header, into a buffer."""
        begin -= self.header_bytes
        for at in range(max(0, bisect_right(self.offsets, begin) - 1), len(self.pieces)):
            piece, start = self.pieces[at], self.offsets[at]
            low, high = max(start, begin), min(start + piece.nbytes, begin + count)
            if low < high:
                size, dtype = piece.dtype.itemsize, piece.dtype
                into = torch.frombuffer(buffer, dtype=dtype, count=(high - low) // size, offset=low - begin)
                piece.source((low - start) // size, into)
            elif start >= begin + count:
                return

    def header(self, checksums: Sequence[int]) -> bytes:
        """Return the header with these checksums. It fills whole pages, so that blocks begin at a page."""
        ties = {other: piece.names[0] for piece in self.pieces for other in piece.names[1:]}
        sums = {CHECKSUMS: " ".join([str(BLOCK), *(f"{value:08x}" for value in checksums)])}
        coded = {
            piece.names[0]: {"dtype": _TAGS[piece.coded[0]], "shape": piece.coded[1]}
            for piece in self.pieces
            if piece.coded
        }
        described = {CODED: json.dumps({"version": VERSION, "tensors": coded})} if coded else {}
        text_of_file = {"format": "pt", **ties, **self.metadata, **sums, **described}
        listed: dict[str, object] = {"__metadata__": text_of_file}
        for piece, offset in zip(self.pieces, self.offsets, strict=True):
            listed[piece.names[0]] = {
                "dtype": _TAGS[piece.dtype],
                "shape": list(piece.shape),
                "data_offsets": [offset, offset + piece.nbytes],
            }
        text = json.dumps(listed, separators=(",", ":")).encode()
        length = align_up(8 + len(text)) - 8  # the format allows spaces at the end
        return length.to_bytes(8, "little") + text.ljust(length)


def split(pieces: Sequence[Piece], limit: int | None, metadata: Mapping[str, str]) -> list[Layout]:
    """Distribute pieces, in order, over files with at most `limit` bytes of tensors each.

    A larger tensor gets a file for itself. If `limit` is None, there is one file.
    """
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        size += piece.nbytes
        if limit is not None and size > limit and shards[-1]:
            shards.append([])
            size = piece.nbytes
        shards[-1].append(piece)
    return [Layout(shard, metadata) for shard in shards]
