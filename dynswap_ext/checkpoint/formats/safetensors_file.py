"""Opens safetensors files: a JSON header, then the tensors' bytes.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext.checkpoint.formats.common import (
    AGAIN,
    byte_count,
    mapped_tensor,
    opened,
    parse_json,
    pread,
    shown,
    truncated,
)
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.reader import LOSSLESS, Checkpoint, Entry
from dynswap_ext.errors import SourceError
from dynswap_ext.lossless.code import CODABLE, fits
from dynswap_ext.lossless.tensor import LosslessTensor

#: The key of a file's metadata that says which of its entries are coded without loss, and of what.
CODED: Final = "dynswap_lossless"
#: The version of the code that is read and written here.
VERSION: Final = 1

#: The format's own limit on the length of the header.
_HEADER_LIMIT = 100_000_000

#: Torch's dtypes by safetensors' names. GGUF uses the same names.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(path: Path) -> Checkpoint:
    """Return the checkpoint of one safetensors file.

    A file whose tensors overlap, or that has unused bytes between or after them, is refused, as by the
    safetensors library. No writer makes such a file, so it is damaged, or two files in one.

    The library itself is not used: its get_tensor() touches each tensor. Because the kernel reads around each
    page that is touched, that was measured to read all of a 1.5 GB file from the disk at load time.
    """
    with opened(path) as (descriptor, size):
        entries, metadata = _read_header(path, descriptor, size)
        storage = map_file(path, descriptor, size)
    entries = _decoded(path, entries, metadata.pop(CODED, None))

    def tensor(name: str) -> torch.Tensor:
        entry = entries[name]
        if not entry.encoding:
            return mapped_tensor(storage, entry)
        coded = mapped_tensor(storage, replace(entry, dtype=torch.uint8, shape=(entry.nbytes,)))
        return LosslessTensor(coded, entry.dtype, entry.shape, f"{name} in {path}")

    return Checkpoint(path, "safetensors", entries, files=(path,), tensor=tensor, metadata=metadata)


def _read_header(path: Path, descriptor: int, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the entries, sorted by offset, and the metadata."""
    length = int.from_bytes(pread(descriptor, 8, 0), "little")
    begin = 8 + length
    if length > _HEADER_LIMIT:
        allowed = f"the format allows {_HEADER_LIMIT:,}"
        raise SourceError(f"{path} has a safetensors header of {length:,} bytes, {allowed}; {AGAIN}")
    if begin > size:
        raise truncated(path, begin, size, "its header alone")
    try:
        listed = parse_json(pread(descriptor, length, 8))
        if not isinstance(listed, dict):
            raise ValueError("it is no JSON object")
        metadata = listed.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"it has {shown(metadata)} for __metadata__, expected an object of text")
    except ValueError as error:
        raise SourceError(f"{path} has a damaged safetensors header: {error}; {AGAIN}") from error
    entries = {name: _entry(name, listing, path, begin) for name, listing in listed.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset or 0, item[1].nbytes)))
    _check_places(path, entries, begin, size)
    return entries, metadata


def _entry(name: str, listing: Any, path: Path, begin: int) -> Entry:
    try:
        name.encode()  # half a surrogate pair is no text, and raises a UnicodeError, a ValueError
        start, end = listing["data_offsets"]
        shape, dtype = listing["shape"], DTYPES[listing["dtype"]]
        if type(start) is not int or type(end) is not int or type(shape) is not list:
            raise ValueError("offsets have to be integers, and a shape a list of them")
        nbytes = byte_count(dtype, tuple(shape))
        if start < 0 or nbytes != end - start:
            raise ValueError("offsets and shape disagree")
        return Entry(dtype, tuple(shape), nbytes, path, begin + start)
    except (ValueError, TypeError, KeyError) as error:
        missing = " is missing, or is no dtype of torch" if isinstance(error, KeyError) else ""
        raise SourceError(
            f"{path} lists {shown(name)} as {shown(listing)}, which cannot be mapped here: {error}{missing}; "
            f"{AGAIN}"
        ) from error


def _decoded(path: Path, entries: dict[str, Entry], text: str | None) -> dict[str, Entry]:
    """Return the entries with the dtypes and shapes of what is coded, which the metadata has as `text`."""
    if text is None:
        return entries
    name: Any = None
    try:
        described = parse_json(text.encode())
        if described["version"] != VERSION:
            raise ValueError(f"its version is {shown(described['version'])}, and {VERSION} is read here")
        decoded = dict(entries)
        for name, listing in described["tensors"].items():
            entry, dtype, shape = entries[name], DTYPES[listing["dtype"]], tuple(listing["shape"])
            count = byte_count(dtype, shape) // dtype.itemsize
            if dtype not in CODABLE or entry.dtype != torch.uint8 or not fits(entry.nbytes, dtype, count):
                raise ValueError(f"{entry.nbytes:,} bytes of {entry.dtype} cannot stand for {shown(listing)}")
            decoded[name] = replace(entry, dtype=dtype, shape=shape, encoding=LOSSLESS)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        missing = " is missing, or is no dtype of torch" if isinstance(error, KeyError) else ""
        raise SourceError(
            f"{path} has entries that are coded without loss, and what its metadata says of "
            f"{'them' if name is None else shown(name)} cannot be read here: {error}{missing}; update "
            f"dynswap_ext, or {AGAIN}"
        ) from error
    return decoded


def _check_places(path: Path, entries: dict[str, Entry], begin: int, size: int) -> None:
    """Raise SourceError unless the entries, which are sorted by offset, fill the file without overlaps."""
    at, before, wrong = begin, "the header", ""
    for name, entry in entries.items():
        offset = entry.offset or 0
        if offset != at and not wrong:
            relation = "overlaps" if offset < at else f"leaves {offset - at:,} bytes unused after"
            wrong = f"{shown(name)} {relation} {before}"
        at, before = max(at, offset + entry.nbytes), shown(name)
    if at > size:
        raise truncated(path, at, size, "what its header lists")
    if at < size and not wrong:
        wrong = f"{size - at:,} bytes follow {before}"
    if wrong:
        raise SourceError(
            f"{path} has a damaged safetensors header, or was put together from several files: {wrong}, and "
            f"the format allows neither gaps nor overlaps; {AGAIN}"
        )
