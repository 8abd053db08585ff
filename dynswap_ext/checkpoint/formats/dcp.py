"""Folders of ``torch.distributed.checkpoint``: files of saved tensors, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, opened, shown, truncated
from dynswap_ext.checkpoint.formats.dcp_metadata import Chunk, Listing, Range, read_metadata
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.nested import find_state_dict
from dynswap_ext.checkpoint.formats.torch_zip import offset_in, saved_object
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: What makes a folder one of these.
METADATA = ".metadata"


class DistributedCheckpoint(Checkpoint):
    """One folder. Of a nested state dict it is the model's part, under the names that the model gave it.

    A tensor saved whole is mapped. One saved in chunks is put together in memory when it is asked for.
    """

    format = "distributed checkpoint"

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        self._folder, self._weights_only = path, weights_only
        state = find_state_dict(path, self._tree(), _dimensions)
        listings = {name: value for name, value in state.items() if isinstance(value, Listing)}
        for name, listing in listings.items():
            if problem := _cover_problem(listing):
                raise SourceError(f"{path / METADATA}: {shown(name)} {problem}; {AGAIN}, or save it again")
        self._chunked = {name: listing for name, listing in listings.items() if len(listing.chunks) != 1}
        self._whole: dict[str, torch.Tensor] = {}
        offsets = self._map_whole(listings)
        super().__init__(
            path,
            {
                name: Entry(
                    listing.dtype,
                    listing.shape,
                    listing.nbytes,
                    path / (listing.chunks[0].range.file if listing.chunks else METADATA),
                    offsets.get(name),
                )
                for name, listing in listings.items()
            },
            files=tuple(path / file for file in _files(listings)),
            objects={
                name: _built(value, lambda leaf, name=name: self._value(name, leaf))  # type: ignore[misc]
                for name, value in state.items()
                if name not in listings
            },
        )

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._whole[name] if name in self._whole else self._value(name, self._chunked[name])

    def _tree(self) -> dict[Any, Any]:
        """The state dict that was saved, with a listing or a range for each value."""
        root: dict[Any, Any] = {}
        for item, leaf in read_metadata(self._folder / METADATA).items():
            node = root
            for part in item[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    break
            if not isinstance(node, dict) or item[-1] in node:
                name = ".".join(map(str, item))
                raise SourceError(f"{self._folder / METADATA} is damaged: {name!r} is in it twice; {AGAIN}")
            node[item[-1]] = leaf
        return root

    def _map_whole(self, listings: dict[str, Listing]) -> dict[str, int | None]:
        """Map the tensors that were saved whole, and return where in their files they are."""
        offsets: dict[str, int | None] = {}
        for file, names in _files(listings).items():
            path = self._folder / file
            with opened(path) as (descriptor, size):
                mapped = map_file(path, descriptor, size) if size else torch.empty(0).untyped_storage()
                for name in names:
                    for chunk in listings[name].chunks:
                        if chunk.range.file == file:
                            _check_range(path, name, chunk.range, size)
                    if name not in self._chunked:
                        (chunk,) = listings[name].chunks
                        value = self._read(path, descriptor, name, chunk.range, mapped)
                        self._whole[name] = _checked(path, name, listings[name].dtype, chunk, value)
                        offsets[name] = offset_in(value, mapped)
        return offsets

    def _value(self, name: str, leaf: Listing | Range) -> Any:
        """What was saved: an object, or a tensor that is put together."""
        if isinstance(leaf, Range):
            return self._saved(name, leaf)
        whole = torch.empty(leaf.shape, dtype=leaf.dtype)
        for chunk in leaf.chunks:
            part = whole
            for dimension, (start, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                part = part.narrow(dimension, start, length)
            path = self._folder / chunk.range.file
            part.copy_(_checked(path, name, leaf.dtype, chunk, self._saved(name, chunk.range)))
        return whole

    def _saved(self, name: str, place: Range) -> Any:
        """What was saved at a place, over a mapping of its own: pages that are read stay in memory."""
        path = self._folder / place.file
        with opened(path) as (descriptor, size):
            _check_range(path, name, place, size)
            return self._read(path, descriptor, name, place, map_file(path, descriptor, size))

    def _read(
        self, path: Path, descriptor: int, name: str, place: Range, mapped: torch.UntypedStorage
    ) -> Any:
        part = mapped[place.offset : place.offset + place.length]
        try:
            return saved_object(path, descriptor, place.offset, part, self._weights_only)
        except SourceError as error:
            raise SourceError(
                f"{path} is damaged where {shown(name)} is, or cannot be used: {error}"
            ) from error


def _built(tree: Any, value: Callable[[Any], Any]) -> Any:
    """Return a tree of dicts with its leaves' values, and lists where the keys are indexes."""
    if not isinstance(tree, dict):
        return value(tree)
    if tree and all(isinstance(key, int) for key in tree):
        return [_built(tree[key], value) for key in sorted(tree)]
    return {key: _built(inner, value) for key, inner in tree.items()}


def _dimensions(leaf: object) -> int | None:
    return len(leaf.shape) if isinstance(leaf, Listing) else None


def _files(listings: dict[str, Listing]) -> dict[str, list[str]]:
    """The files, each with the tensors that have bytes in it."""
    names: dict[str, dict[str, None]] = {}
    for name, listing in listings.items():
        for chunk in listing.chunks:
            names.setdefault(chunk.range.file, {})[name] = None
    return {file: list(names[file]) for file in sorted(names)}


def _check_range(path: Path, name: str, place: Range, size: int) -> None:
    if place.offset + place.length > size:
        raise truncated(path, place.offset + place.length, size, shown(name))


def _checked(path: Path, name: str, dtype: torch.dtype, chunk: Chunk, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dtype == dtype and tuple(value.shape) == chunk.shape:
        return value
    raise SourceError(
        f"{path} does not have for {shown(name)} the {dtype} tensor of shape {list(chunk.shape)} that "
        f"{METADATA} lists; the two are not of one save: {AGAIN}"
    )


def _cover_problem(listing: Listing) -> str:
    """How the chunks, each inside the tensor, fail to fill it; empty if they do."""
    for chunk in listing.chunks:
        # Before memory is allocated for what a damaged file says.
        if (nbytes := math.prod(chunk.shape) * listing.dtype.itemsize) > chunk.range.length:
            return f"has {nbytes:,} bytes at {list(chunk.offsets)}, stored in {chunk.range.length:,}"
    wanted, given = math.prod(listing.shape), sum(math.prod(chunk.shape) for chunk in listing.chunks)
    if given != wanted:
        return f"has chunks of {given:,} elements, and {wanted:,} elements"
    if len(listing.chunks) < 2:
        return ""
    # No overlap and as many elements as the whole: nothing is missing. A sweep along the dimension that is
    # cut most often meets few boxes at a time.
    along = max(
        range(len(listing.shape)), key=lambda axis: len({chunk.offsets[axis] for chunk in listing.chunks})
    )
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
