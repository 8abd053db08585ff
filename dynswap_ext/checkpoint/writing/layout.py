"""Which tensors go into which safetensors file, and where in it."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from dynswap_ext._util.memory import parse_bytes
from dynswap_ext.checkpoint.formats.safetensors_file import DTYPES
from dynswap_ext.checkpoint.writing.direct import ALIGNMENT, align_up
from dynswap_ext.checkpoint.writing.sources import Source
from dynswap_ext.errors import ConfigError

#: Bytes of a file's tensors that one checksum is of, and that are written at a time.
BLOCK: Final = 4 << 20
#: Where tensors begin that can: a cache line, and what vector instructions ask for.
TENSOR_ALIGNMENT: Final = 64
#: Under this name a file's metadata has the checksums of its blocks.
CHECKSUMS: Final = "dynswap.crc32"
#: As huggingface_hub splits by default.
DEFAULT_SHARD: Final = 5_000_000_000

#: Safetensors' names of torch's dtypes.
TAGS: Final = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """One tensor to be written."""

    #: The first is the entry's; the others are ties, which the metadata names.
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: Source

    @property
    def nbytes(self) -> int:
        """As written."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Layout:
    """One file: a header that fills whole pages, then the tensors, one after the other.

    The format has no room between tensors. So those whose size is a multiple of 64 bytes come first, and each
    begins at a multiple of 64. The others follow by size of element, and each begins at a multiple of that.
    Among equals the order is the one they came in, which is more or less that of use.

    The checksums are in the header's metadata. Their number is known before, so the header's length is.
    """

    pieces: list[Piece]
    metadata: dict[str, str]
    offsets: list[int] = field(init=False)
    data_bytes: int = field(init=False)
    header_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = sorted(
            self.pieces, key=lambda piece: (piece.nbytes % TENSOR_ALIGNMENT != 0, -piece.dtype.itemsize)
        )
        self.offsets = [0]
        for piece in self.pieces:
            self.offsets.append(self.offsets[-1] + piece.nbytes)
        self.data_bytes = self.offsets.pop()
        self.header_bytes = len(self.header([0] * self.blocks))

    @property
    def blocks(self) -> int:
        """How many there are; the last may be shorter."""
        return -(-self.data_bytes // BLOCK)

    @property
    def file_bytes(self) -> int:
        """Header and tensors."""
        return self.header_bytes + self.data_bytes

    def block(self, number: int) -> tuple[int, int]:
        """Begin and length of a block, from the first tensor's begin."""
        return number * BLOCK, min(BLOCK, self.data_bytes - number * BLOCK)

    def within(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int, int]]:
        """Pieces with bytes there: the piece, begin and end of its part, and the first byte of the piece."""
        for at in range(max(0, bisect_right(self.offsets, begin) - 1), len(self.pieces)):
            start = self.offsets[at]
            if start >= end:
                return
            low, high = max(start, begin), min(start + self.pieces[at].nbytes, end)
            if low < high:
                yield self.pieces[at], low, high, start

    def header(self, checksums: Sequence[int]) -> bytes:
        """The file's first bytes; whole pages, so that tensors can be read past the cache."""
        ties = {other: piece.names[0] for piece in self.pieces for other in piece.names[1:]}
        sums = {CHECKSUMS: " ".join([str(BLOCK), *(f"{value:08x}" for value in checksums)])}
        listed: dict[str, object] = {"__metadata__": {"format": "pt", **ties, **self.metadata, **sums}}
        for piece, offset in zip(self.pieces, self.offsets, strict=True):
            listed[piece.names[0]] = {
                "dtype": TAGS[piece.dtype],
                "shape": list(piece.shape),
                "data_offsets": [offset, offset + piece.nbytes],
            }
        text = json.dumps(listed, separators=(",", ":")).encode()
        length = align_up(8 + len(text), ALIGNMENT) - 8  # the format allows spaces at the end
        return length.to_bytes(8, "little") + text.ljust(length)


def split(pieces: Sequence[Piece], limit: int | None, metadata: Mapping[str, str]) -> list[Layout]:
    """Files of at most `limit` bytes of tensors; a larger tensor has one for itself."""
    shards: list[list[Piece]] = [[]]
    room = limit
    for piece in pieces:
        if limit is not None and room is not None:
            if shards[-1] and piece.nbytes > room:
                shards.append([])
                room = limit
            room -= piece.nbytes
        shards[-1].append(piece)
    return [Layout(shard, dict(metadata)) for shard in shards]


def index_text(layouts: Sequence[Layout], names: Sequence[str]) -> str:
    """What a ``*.safetensors.index.json`` says of shards with these names."""
    weights = {
        piece.names[0]: name for layout, name in zip(layouts, names, strict=True) for piece in layout.pieces
    }
    total = sum(layout.data_bytes for layout in layouts)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(content, indent=2) + "\n"


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigError for a dtype that safetensors has not."""
    if dtype not in TAGS:
        raise ConfigError(
            f"{name} is {dtype}, which the safetensors format has no name for; cast it, or save to a path "
            "that ends in .pt"
        )


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The metadata that a user gave, if it can go into a header."""
    given = dict(metadata or {})
    wrong = [name for name, text in given.items() if not isinstance(name, str) or not isinstance(text, str)]
    if wrong:
        raise ConfigError(
            f"metadata has something else than text under {', '.join(map(repr, wrong[:5]))}; safetensors "
            "keeps only text, so write it as such (json.dumps)"
        )
    return given


def shard_bytes(given: int | str | None) -> int | None:
    """Bytes of a shard's largest size, as a person wrote it."""
    if given is None:
        return None
    try:
        size = parse_bytes(given)
    except ConfigError:
        size = 0
    if not isinstance(size, int) or isinstance(given, float) or size < 1:
        raise ConfigError(f"max_shard_size is {given!r}; expected bytes, or a size such as '5GB' or '512MiB'")
    if size < 1 << 20 and not str(given).strip()[-1].isalpha():
        raise ConfigError(
            f"max_shard_size is {given!r}, a number without a unit; write a size such as '5GB', or "
            f"'{size}B' if so few bytes are intended"
        )
    return size
