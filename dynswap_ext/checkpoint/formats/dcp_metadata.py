"""Reads the ``.metadata`` of ``torch.distributed.checkpoint``: a pickle, of which no code is run."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, byte_count, content_of, is_inside, shown
from dynswap_ext.errors import SourceError

#: Far more than the largest model on the largest cluster needs.
_SIZE_LIMIT = 1 << 30
_MAX_DIMENSIONS = 64
_MAX_DEPTH = 64
#: Quantised dtypes: a tensor has a scale in addition to its elements.
_SCALED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}

#: The path of an item in the state dict that was saved: names, and indexes into lists.
ItemPath = tuple[str | int, ...]


class Range(NamedTuple):
    """A range of a file in the folder, into which ``torch.save`` wrote one object."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor's elements, and the file range of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    range: Range


class Listing(NamedTuple):
    """A tensor as the metadata list it. The chunks are inside its shape, but may overlap or leave gaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(path: Path) -> dict[ItemPath, Listing | Range]:
    """Return the tensors, and the ranges of other objects, by their paths in the state dict that was saved.

    No class that the file names is imported, and none of its code runs.

    Raises
    ------
    SourceError
        The file is damaged, or asks for more than the format needs. Names the file, the key and the remedy.
    """
    data = content_of(path, _SIZE_LIMIT, "such metadata")
    try:
        for opcode, _, _ in pickletools.genops(data):
            if opcode.code not in _OPCODES:
                raise pickle.UnpicklingError(f"a pickle with the opcode {opcode.name}")
        content = _Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except Exception as error:  # a damaged pickle can raise anything
        reason = error if isinstance(error, pickle.UnpicklingError) else f"damaged ({type(error).__name__})"
        raise SourceError(
            f"{path} is not the metadata that torch.distributed.checkpoint writes: it is {reason}. What it "
            f"asks for is not run; {AGAIN}, or save the weights again with torch.distributed.checkpoint.save"
        ) from error
    owner = "it"
    items: dict[ItemPath, Listing | Range] = {}
    try:
        paths = getattr(content, "planner_data", None)
        # The place of each object, by the item's name and, for a chunk of a tensor, its offsets.
        stored = {
            (getattr(index, "fqn", None), getattr(index, "offset", None)): info
            for index, info in _field(content, "storage_data", dict).items()
        }
        for name, listing in _field(content, "state_dict_metadata", dict).items():
            owner = shown(name)
            item = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
            if not (isinstance(item, tuple) and 0 < len(item) <= _MAX_DEPTH) or not all(
                type(part) in (str, int) for part in item
            ):
                raise ValueError("a path in the state dict that is no tuple of names")
            # The metadata of an object that is no tensor (BytesStorageMetadata) have no attributes.
            is_object = isinstance(listing, _StandIn) and not vars(listing)
            items[item] = _range(stored.get((name, None))) if is_object else _tensor(listing, stored, name)
    except (ValueError, TypeError) as error:
        raise SourceError(f"{path} is damaged: {owner} has {error}; {AGAIN}") from error
    except SourceError as error:
        raise SourceError(f"{path}: {owner} {error}") from error
    return items


def _tensor(listing: Any, stored: dict[Any, Any], name: Any) -> Listing:
    shape = _lengths(listing, "size")
    properties = getattr(getattr(listing, "properties", None), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype")
    byte_count(dtype, shape)
    chunks = []
    for chunk in _field(listing, "chunks", list):
        offsets, sizes = _lengths(chunk, "offsets"), _lengths(chunk, "sizes")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk of {len(sizes)} dimensions in a tensor of {len(shape)}")
        if any(start + length > whole for start, length, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk at {shown(offsets)} that ends outside of {shown(shape)}")
        if 0 not in sizes:
            chunks.append(Chunk(offsets, sizes, _range(stored.get((name, offsets)))))
    if len(chunks) > 1 and dtype in _SCALED:
        raise ValueError(f"the dtype {dtype}, whose scale is not in chunks")
    return Listing(dtype, shape, tuple(chunks))


def _range(info: Any) -> Range:
    if info is None:
        raise ValueError("no place for its bytes, or for some of them")
    file: str = _field(info, "relative_path", str)
    offset, length = _field(info, "offset", int), _field(info, "length", int)
    if getattr(info, "transform_descriptors", None):
        raise SourceError(
            "was written through an extension (compression, for one), so its bytes cannot be mapped; load it "
            "with torch.distributed.checkpoint.load and save it without extensions"
        )
    if offset < 0 or length < 0 or offset + length >= 1 << 63:
        raise ValueError(f"bytes {shown(offset)} to {shown(offset + length)}")
    if not is_inside(file):
        raise SourceError(
            f"is in {shown(file)}, which is not a file in its folder; put the file there, and save the "
            "weights again with torch.distributed.checkpoint.save"
        )
    return Range(file, offset, length)


def _lengths(owner: Any, field: str) -> tuple[int, ...]:
    lengths: tuple[int, ...] = _field(owner, field, tuple)
    if not all(type(length) is int and 0 <= length < 1 << 63 for length in lengths):
        raise ValueError(f"the {field} {shown(lengths)}")
    return lengths


def _field(owner: Any, field: str, kind: type) -> Any:
    value = getattr(owner, field, None) if isinstance(owner, _StandIn) else None
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} for {field}, expected a {kind.__name__}")
    return value


# ---- a pickle as data --------------------------------------------------------------------------------------


class _StandIn:
    """Replaces a class or function that the pickle names. It keeps attributes, and runs no code."""

    def __init__(self, *_arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = state if isinstance(state, dict) else {"state": state}


def _size(lengths: Any) -> tuple[Any, ...]:
    """Replace torch.Size, with a limit on the dimensions: a small pickle could make many large tuples."""
    if not isinstance(lengths, (tuple, list)) or len(lengths) > _MAX_DIMENSIONS:
        raise TypeError("no size")
    return tuple(lengths)


class _Unpickler(pickle.Unpickler):
    """Unpickles dtypes of torch, and stand-ins for classes of the format. Refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch", "Size"):
            return _size
        if module.startswith(("torch.distributed.checkpoint.", "pathlib")) or name == "_get_layout":
            return _StandIn
        raise pickle.UnpicklingError(f"a pickle that asks for {module}.{name}")


#: The opcodes that are allowed, as such a pickle has no others. Two kinds would be harmful: those that write
#: to any number of the memo, for which the pickle module would allocate a list of that length, and those
#: that use the process's registry of extensions.
_OPCODES = b"()]}.0e2NRabsutQ\x81\x85\x86\x87\x88\x89\x93\x94\x80KhqMJjG\x95CU\x8a\x8cBXc".decode("latin-1")
