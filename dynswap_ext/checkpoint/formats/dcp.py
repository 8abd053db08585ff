"""Opens folders of ``torch.distributed.checkpoint``: files of saved tensors, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, opened, shown, truncated
from dynswap_ext.checkpoint.formats.dcp_metadata import Chunk, Listing, Range, read_metadata
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.torch_zip import find_state_dict, offset_in, saved_object
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: The file that shows that a folder is a distributed checkpoint, and lists its tensors.
METADATA = ".metadata"


def read_distributed(path: Path, weights_only: bool) -> Checkpoint:
    """Return the checkpoint in a folder. From a nested state dict, only the model's part is taken.

    A tensor that was saved whole is mapped. One that was saved in chunks is put together in memory each time
    it is asked for.
    """
    folder = _Folder(path, weights_only)
    state = find_state_dict(path, folder.tree(), Listing)
    listings = {name: value for name, value in state.items() if isinstance(value, Listing)}
    by_file: dict[str, list[tuple[str, Chunk]]] = {}
    for name, listing in listings.items():
        if problem := _cover_problem(listing):
            raise SourceError(f"{path / METADATA}: {shown(name)} {problem}; {AGAIN}, or save it again")
        for chunk in listing.chunks:
            by_file.setdefault(chunk.range.file, []).append((name, chunk))
    whole: dict[str, torch.Tensor] = {}
    offsets: dict[str, int | None] = {}
    for name_of_file, chunks in by_file.items():
        with folder.open(name_of_file) as file:
            for name, chunk in chunks:
                file.check(name, chunk.range)
                if len(listings[name].chunks) == 1:
                    whole[name] = file.tensor(name, listings[name].dtype, chunk)
                    offsets[name] = offset_in(whole[name], file.mapped)

    def entry(name: str, listing: Listing) -> Entry:
        nbytes = math.prod(listing.shape) * listing.dtype.itemsize
        file = path / (listing.chunks[0].range.file if listing.chunks else METADATA)
        return Entry(listing.dtype, listing.shape, nbytes, file, offsets.get(name))

    return Checkpoint(
        path,
        "distributed checkpoint",
        entries={name: entry(name, listing) for name, listing in listings.items()},
        files=tuple(path / file for file in sorted(by_file)),
        tensor=lambda name: whole[name] if name in whole else folder.value(name, listings[name]),
        objects={name: folder.value(name, tree) for name, tree in state.items() if name not in listings},
    )


@dataclass
class _Folder:
    path: Path
    weights_only: bool

    def tree(self) -> dict[Any, Any]:
        """Return the state dict that was saved, with a `Listing` in place of each tensor.

        Every other value is replaced by the `Range` where its bytes are.
        """
        root: dict[Any, Any] = {}
        for item, leaf in read_metadata(self.path / METADATA).items():
            node: Any = root
            for part in item[:-1]:
                node = node.setdefault(part, {}) if isinstance(node, dict) else node
            if not isinstance(node, dict) or item[-1] in node:
                name = ".".join(map(str, item))
                raise SourceError(f"{self.path / METADATA} is damaged: {name!r} is in it twice; {AGAIN}")
            node[item[-1]] = leaf
        return root

    @contextmanager
    def open(self, file: str) -> Iterator[_File]:
        """Open a file with a new mapping, so that pages that are read are freed together with the mapping."""
        path = self.path / file
        with opened(path) as (descriptor, size):
            mapped = map_file(path, descriptor, size) if size else torch.empty(0).untyped_storage()
            yield _File(path, descriptor, mapped, self.weights_only)

    def value(self, name: str, leaf: Listing | Range | dict[Any, Any]) -> Any:
        """Read the value of a leaf, or of a tree of leaves, into memory.

        The chunks of a tensor are put together. A dict whose keys are indexes becomes a list.
        """
        if isinstance(leaf, dict):
            if leaf and all(isinstance(key, int) for key in leaf):
                return [self.value(name, leaf[key]) for key in sorted(leaf)]
            return {key: self.value(name, inner) for key, inner in leaf.items()}
        if isinstance(leaf, Range):
            with self.open(leaf.file) as file:
                return file.saved(name, leaf)
        whole = torch.empty(leaf.shape, dtype=leaf.dtype)
        for chunk in leaf.chunks:
            box = tuple(slice(start, start + n) for start, n in zip(chunk.offsets, chunk.shape, strict=True))
            with self.open(chunk.range.file) as file:
                whole[box] = file.tensor(name, leaf.dtype, chunk)
        return whole


@dataclass
class _File:
    path: Path
    descriptor: int
    mapped: torch.UntypedStorage
    weights_only: bool

    def check(self, name: str, place: Range) -> None:
        if (end := place.offset + place.length) > self.mapped.nbytes():
            raise truncated(self.path, end, self.mapped.nbytes(), shown(name))

    def saved(self, name: str, place: Range) -> Any:
        """Return the object that ``torch.save`` wrote into this range of the file."""
        self.check(name, place)
        part = self.mapped[place.offset : place.offset + place.length]
        try:
            return saved_object(self.path, self.descriptor, place.offset, part, self.weights_only)
        except SourceError as error:
            raise SourceError(
                f"{self.path} is damaged where {shown(name)} is, or cannot be used: {error}"
            ) from error

    def tensor(self, name: str, dtype: torch.dtype, chunk: Chunk) -> torch.Tensor:
        value = self.saved(name, chunk.range)
        if isinstance(value, torch.Tensor) and value.dtype == dtype and tuple(value.shape) == chunk.shape:
            return value
        raise SourceError(
            f"{self.path} does not have for {shown(name)} the {dtype} tensor of shape {list(chunk.shape)} "
            f"that {METADATA} lists; the two are not of one save: {AGAIN}"
        )


def _cover_problem(listing: Listing) -> str:
    """Return what is wrong if the chunks, each inside the tensor, do not fill it; else an empty string."""
    for chunk in listing.chunks:
        # So that no memory is allocated for a size that a damaged file claims.
        if (nbytes := math.prod(chunk.shape) * listing.dtype.itemsize) > chunk.range.length:
            return f"has {nbytes:,} bytes at {list(chunk.offsets)}, stored in {chunk.range.length:,}"
    wanted, given = math.prod(listing.shape), sum(math.prod(chunk.shape) for chunk in listing.chunks)
    if given != wanted:
        return f"has chunks of {given:,} elements, and {wanted:,} elements"
    if len(listing.chunks) < 2:
        return ""
    # Chunks that have as many elements as the tensor, and do not overlap, fill it. To find overlaps, sweep
    # along the dimension that is cut most often, where few chunks meet at a time.
    starts = zip(*(chunk.offsets for chunk in listing.chunks), strict=True)
    along = max(enumerate(starts), key=lambda axis: len(set(axis[1])))[0]
    open_chunks: list[Chunk] = []
    for chunk in sorted(listing.chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        open_chunks = [other for other in open_chunks if other.offsets[along] + other.shape[along] > start]
        if any(_overlap(chunk, other) for other in open_chunks):
            return "has chunks that overlap"
        open_chunks.append(chunk)
    return ""


def _overlap(left: Chunk, right: Chunk) -> bool:
    boxes = zip(left.offsets, left.shape, right.offsets, right.shape, strict=True)
    return all(one < other + length and other < one + own for one, own, other, length in boxes)
