"""The ``.metadata`` of ``torch.distributed.checkpoint``: a pickle, read here as data alone."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, byte_count, opened, pread, shown
from dynswap_ext.checkpoint.formats.restricted_pickle import StandIn, restricted_loads
from dynswap_ext.errors import SourceError

#: Far more than the largest model on the largest cluster needs.
_SIZE_LIMIT = 1 << 30
_MAX_DIMENSIONS = 64
_MAX_DEPTH = 64
#: Tensors of these are more than their elements.
_SCALED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

#: The path of an item in the state dict that was saved: names, and indexes into lists.
ItemPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What ``torch.save`` wrote, as a range of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor's elements, and where it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Listing:
    """A tensor. Its chunks are inside its shape; whether they fill it is not checked."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a folder holds, by the paths in the state dict that was saved."""

    tensors: dict[ItemPath, Listing]
    objects: dict[ItemPath, Place]


def read_metadata(path: Path) -> Metadata:
    """Read the file; none of the classes that it names is imported, and no code of it runs.

    Raises
    ------
    SourceError
        It is damaged, or asks for more than the format needs. Names the file, the key and the remedy.
    """
    with opened(path) as (descriptor, size):
        if size > _SIZE_LIMIT:
            raise SourceError(f"{path} has {size:,} bytes, expected at most {_SIZE_LIMIT:,}; {AGAIN}")
        data = pread(descriptor, size, 0)
    try:
        content = restricted_loads(data, _NAMES)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path} is not the metadata that torch.distributed.checkpoint writes: {error}. What it asks for "
            f"is not run; {AGAIN}, or save the weights anew with torch.distributed.checkpoint.save"
        ) from error
    listed = _field(content, "state_dict_metadata", dict, path, "it")
    stored = {
        (index.fqn, index.offset): info
        for index, info in _field(content, "storage_data", dict, path, "it").items()
        if isinstance(index, _Index)
    }
    planned = getattr(content, "planner_data", None)
    tensors: dict[ItemPath, Listing] = {}
    objects: dict[ItemPath, Place] = {}
    for name, listing in listed.items():
        if not isinstance(name, str):
            raise _damaged(path, "it", f"an entry named by a {type(name).__name__}")
        item = _item_path(planned.get(name, (name,)) if isinstance(planned, dict) else (name,), path, name)
        if isinstance(listing, _Bytes):
            objects[item] = _place(stored.get((name, None)), path, name)
        else:
            tensors[item] = _tensor(listing, stored, path, name)
    return Metadata(tensors, objects)


# ---- what the pickle's objects have to be ------------------------------------------------------------------


def _tensor(listing: Any, stored: dict[Any, Any], path: Path, name: str) -> Listing:
    shape = _lengths(listing, "size", path, name)
    properties = getattr(getattr(listing, "properties", None), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise _damaged(path, name, "no dtype")
    try:
        nbytes = byte_count(dtype, shape)
    except ValueError as error:
        raise _damaged(path, name, str(error)) from error
    chunks = []
    for chunk in _field(listing, "chunks", list, path, name):
        offsets, sizes = _lengths(chunk, "offsets", path, name), _lengths(chunk, "sizes", path, name)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _damaged(path, name, f"a chunk of {len(sizes)} dimensions in a tensor of {len(shape)}")
        if any(start + length > whole for start, length, whole in zip(offsets, sizes, shape, strict=True)):
            raise _damaged(path, name, f"a chunk at {shown(offsets)} that ends outside of {shown(shape)}")
        if 0 not in sizes:
            chunks.append(Chunk(offsets, sizes, _place(stored.get((name, offsets)), path, name)))
    if len(chunks) > 1 and dtype in _SCALED:
        raise _damaged(path, name, f"the dtype {dtype}, whose scale is not in chunks")
    return Listing(dtype, shape, nbytes, tuple(chunks))


def _place(info: Any, path: Path, name: str) -> Place:
    if info is None:
        raise _damaged(path, name, "no place for its bytes, or for some of them")
    file = _field(info, "relative_path", str, path, name)
    offset, length = _field(info, "offset", int, path, name), _field(info, "length", int, path, name)
    if getattr(info, "transform_descriptors", None):
        raise SourceError(
            f"{path}: {shown(name)} was written through an extension (compression, for one), so its bytes "
            "cannot be mapped; load it with torch.distributed.checkpoint.load and save it without extensions"
        )
    if offset < 0 or length < 0 or offset + length >= 1 << 63:
        raise _damaged(path, name, f"bytes {shown(offset)} to {shown(offset + length)}")
    parts = PurePosixPath(file)
    if not file or "\0" in file or parts.is_absolute() or ".." in parts.parts:
        raise SourceError(
            f"{path} puts {shown(name)} into {shown(file)}, which is not a file in its folder; put the file "
            "there, and save the weights anew with torch.distributed.checkpoint.save"
        )
    return Place(file, offset, length)


def _item_path(item: Any, path: Path, name: str) -> ItemPath:
    valid = isinstance(item, tuple) and 0 < len(item) <= _MAX_DEPTH
    if not valid or not all(type(part) in (str, int) for part in item):
        raise _damaged(path, name, "a path in the state dict that is no tuple of names")
    path_of_item: ItemPath = item
    return path_of_item


def _lengths(owner: Any, field: str, path: Path, name: str) -> tuple[int, ...]:
    lengths: tuple[int, ...] = _field(owner, field, tuple, path, name)
    if any(type(length) is not int or not 0 <= length < 1 << 63 for length in lengths):
        raise _damaged(path, name, f"the {field} {shown(lengths)}")
    return lengths


def _field(owner: Any, field: str, kind: type, path: Path, name: str) -> Any:
    value = getattr(owner, field, None) if isinstance(owner, StandIn) else None
    if type(value) is not kind:
        raise _damaged(path, name, f"a {type(value).__name__} for {field}, expected a {kind.__name__}")
    return value


def _damaged(path: Path, name: str, has: str) -> SourceError:
    owner = "it" if name == "it" else f"{shown(name)}"
    return SourceError(f"{path} is damaged: {owner} has {has}; {AGAIN}")


# ---- what stands for the names in the pickle ---------------------------------------------------------------


class _Bytes(StandIn):
    """An object that is no tensor."""


class _Index(StandIn):
    """The key of a place: the item's name and, in a tensor, the chunk's offsets."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if type(self.fqn) is not str or not (self.offset is None or _is_size(self.offset)):
            raise TypeError("no index")

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


def _is_size(value: object) -> bool:
    return type(value) is tuple and all(type(length) is int for length in value)


def _size(lengths: Any) -> tuple[Any, ...]:
    if not isinstance(lengths, (tuple, list)) or len(lengths) > _MAX_DIMENSIONS:
        raise TypeError("no size")
    return tuple(lengths)


def _ignored(*_arguments: Any) -> None:
    """Layouts, memory formats, and the folder that it was saved to."""


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_NAMES: dict[str, Any] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _ignored,
    f"{_METADATA}._MEM_FORMAT_ENCODING": _ignored,
    **{
        f"pathlib{module}.{kind}Path": _ignored for module in ("", "._local") for kind in ("Posix", "Windows")
    },
    f"{_METADATA}.BytesStorageMetadata": _Bytes,
    f"{_METADATA}.MetadataIndex": _Index,
    f"{_FILESYSTEM}._StorageInfo": StandIn,
    **{
        f"{_METADATA}.{name}": StandIn
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    },
}
