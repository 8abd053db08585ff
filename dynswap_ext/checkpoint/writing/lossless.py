"""Makes pieces whose bytes are coded without loss, for `save` and `convert`.

The header of a file has the sizes of its tensors, and the sizes of coded ones are known only when they have
been encoded. So each tensor is read and encoded twice: for its size, and again when its bytes are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from dynswap_ext._util.heap import HeapTrimmer
from dynswap_ext.checkpoint.writing.layout import Piece
from dynswap_ext.checkpoint.writing.sources import Latest
from dynswap_ext.errors import SourceError
from dynswap_ext.lossless.code import CODABLE, encode


def coded(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces, in coded form where that is smaller. Memory holds one or two tensors at a time."""
    plain = {piece.names[0]: piece for piece in pieces}
    codable = [piece.nbytes for piece in plain.values() if piece.dtype in CODABLE]
    memory = torch.empty(max(codable, default=0), dtype=torch.uint8, device="cpu")  # as fresh pages cost time
    heap = HeapTrimmer(max(codable, default=0))

    def encoded(name: str) -> torch.Tensor:
        piece = plain[name]
        weights = memory[: piece.nbytes].view(piece.dtype)
        piece.source(0, weights)
        made = encode(weights)
        heap.count(piece.nbytes)
        return torch.empty(0, dtype=torch.uint8) if made is None else made

    latest = Latest(encoded)
    return [_coded(piece, latest) if piece.dtype in CODABLE else piece for piece in plain.values()]


def _coded(piece: Piece, latest: Latest) -> Piece:
    name, size = piece.names[0], latest(piece.names[0]).numel()

    def read(first: int, into: torch.Tensor) -> None:
        again = latest(name)
        if again.numel() != size:
            raise SourceError(f"{name} has changed while it was written; write it when nothing changes it")
        into.copy_(again[first : first + into.numel()])

    form = piece.dtype, piece.shape
    return replace(piece, dtype=torch.uint8, shape=(size,), source=read, coded=form) if size else piece
