"""Folders of ``torch.distributed.checkpoint``: files of saved tensors, whole or in chunks."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import (
    AGAIN,
    first_line,
    mapped_tensor,
    opened,
    pread,
    shown,
    truncated,
)
from dynswap_ext.checkpoint.formats.dcp_metadata import Chunk, ItemPath, Listing, Place, read_metadata
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.nested import build, find_state_dict
from dynswap_ext.checkpoint.formats.zip_records import SavedTensor, saved_tensor
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
        metadata = read_metadata(path / METADATA)
        state = find_state_dict(path, _tree(path, {**metadata.tensors, **metadata.objects}), _dimensions)
        self._folder = path
        self._weights_only = weights_only
        self._listings = {name: value for name, value in state.items() if isinstance(value, Listing)}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._check_chunks()
        offsets = self._map_whole()
        super().__init__(
            path,
            {
                name: Entry(
                    listing.dtype,
                    listing.shape,
                    listing.nbytes,
                    path / listing.chunks[0].place.file if listing.chunks else path / METADATA,
                    offsets.get(name),
                )
                for name, listing in self._listings.items()
            },
            files=tuple(path / file for file in _files(self._listings)),
            objects={
                name: build(value, lambda leaf, name=name: self._value(name, leaf))  # type: ignore[misc]
                for name, value in state.items()
                if name not in self._listings
            },
        )

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        entry = self.entries[name]
        if entry.offset is None:
            return self._assembled(name, self._listings[name])
        storage = self._storages[self._listings[name].chunks[0].place.file]
        return mapped_tensor(storage, entry.offset, entry.nbytes, entry.dtype, entry.shape)

    def _check_chunks(self) -> None:
        for name, listing in self._listings.items():
            if problem := _cover_problem(listing):
                raise SourceError(
                    f"{self._folder / METADATA}: {shown(name)} {problem}; {AGAIN}, or save it anew"
                )

    def _map_whole(self) -> dict[str, int]:
        """Maps the files; where in them those tensors are that can be handed out as views."""
        offsets: dict[str, int] = {}
        for file, names in _files(self._listings).items():
            path = self._folder / file
            with opened(path) as (descriptor, size):
                for name in names:
                    listing = self._listings[name]
                    for chunk in listing.chunks:
                        _check_range(path, name, chunk.place, size, file)
                    if len(listing.chunks) == 1:
                        found = _locate(path, name, listing.dtype, listing.chunks[0], descriptor)
                        if found is not None:
                            offsets[name] = found.offset
                if size:
                    self._storages[file] = map_file(path, descriptor, size)
        return offsets

    def _assembled(self, name: str, listing: Listing) -> torch.Tensor:
        if len(listing.chunks) == 1:
            return self._chunk(name, listing.dtype, listing.chunks[0])
        whole = torch.empty(listing.shape, dtype=listing.dtype)
        for chunk in listing.chunks:
            part = whole
            for dimension, (start, length) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                part = part.narrow(dimension, start, length)
            part.copy_(self._chunk(name, listing.dtype, chunk))
        return whole

    def _chunk(self, name: str, dtype: torch.dtype, chunk: Chunk) -> torch.Tensor:
        path = self._folder / chunk.place.file
        with opened(path) as (descriptor, size):
            _check_range(path, name, chunk.place, size)
            found = _locate(path, name, dtype, chunk, descriptor)
            if found is not None:
                nbytes = math.prod(chunk.shape) * dtype.itemsize
                return mapped_tensor(
                    map_file(path, descriptor, size), found.offset, nbytes, dtype, chunk.shape
                )
        value = self._loaded(name, chunk.place)
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or tuple(value.shape) != chunk.shape:
            raise _contradiction(path, name, dtype, chunk)
        return value

    def _value(self, name: str, leaf: Listing | Place) -> Any:
        return self._assembled(name, leaf) if isinstance(leaf, Listing) else self._loaded(name, leaf)

    def _loaded(self, name: str, place: Place) -> Any:
        """What was saved at that place, read."""
        path = self._folder / place.file
        with opened(path) as (descriptor, size):
            _check_range(path, name, place, size)
            data = pread(descriptor, place.length, place.offset)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=self._weights_only)
        except Exception as error:  # a damaged pickle can raise whatever there is
            raise SourceError(
                f"{path} has something else than tensors and plain values for {shown(name)}, or is damaged "
                f"({first_line(error)}); {AGAIN}, or leave it out when saving"
            ) from error


def _tree(path: Path, leaves: dict[ItemPath, Any]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for item, leaf in leaves.items():
        node = root
        for part in item[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or item[-1] in node:
            raise SourceError(
                f"{path / METADATA} is damaged: {'.'.join(map(str, item))!r} is in it twice; {AGAIN}"
            )
        node[item[-1]] = leaf
    return root


def _dimensions(leaf: object) -> int | None:
    return len(leaf.shape) if isinstance(leaf, Listing) else None


def _files(listings: dict[str, Listing]) -> dict[str, list[str]]:
    """The files, each with the tensors that have bytes in it."""
    names: dict[str, dict[str, None]] = {}
    for name, listing in listings.items():
        for chunk in listing.chunks:
            names.setdefault(chunk.place.file, {})[name] = None
    return {file: list(names[file]) for file in sorted(names)}


def _check_range(path: Path, name: str, place: Place, size: int, file: str | None = None) -> None:
    if file in (None, place.file) and place.offset + place.length > size:
        raise truncated(path, place.offset + place.length, size, shown(name))


def _locate(path: Path, name: str, dtype: torch.dtype, chunk: Chunk, descriptor: int) -> SavedTensor | None:
    try:
        found = saved_tensor(descriptor, chunk.place.offset, chunk.place.length)
    except ValueError as error:
        raise SourceError(f"{path} is damaged where {shown(name)} is: {error}; {AGAIN}") from error
    if found is not None and (found.dtype != dtype or found.shape != chunk.shape):
        raise _contradiction(path, name, dtype, chunk)
    return found


def _contradiction(path: Path, name: str, dtype: torch.dtype, chunk: Chunk) -> SourceError:
    return SourceError(
        f"{path} does not have for {shown(name)} the {dtype} tensor of shape {list(chunk.shape)} that "
        f"{METADATA} lists; the two are not of one save: {AGAIN}"
    )


def _cover_problem(listing: Listing) -> str:
    """How the chunks, each inside the tensor, fail to fill it; empty if they do."""
    for chunk in listing.chunks:
        # Before memory is allocated for what a damaged file says.
        if (nbytes := math.prod(chunk.shape) * listing.dtype.itemsize) > chunk.place.length:
            return f"has {nbytes:,} bytes at {list(chunk.offsets)}, stored in {chunk.place.length:,}"
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
    return all(
        one < other + other_length and other < one + length
        for one, length, other, other_length in zip(
            left.offsets, left.shape, right.offsets, right.shape, strict=True
        )
    )
