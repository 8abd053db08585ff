"""Safetensors: a JSON header, then the tensors' bytes.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, map_file, mapped_tensor, truncated
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: The format's own limit on the length of the header.
_HEADER_LIMIT = 100_000_000

#: Safetensors' names of dtypes, and torch's.
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return len(head) >= 9 and head[8:9] == b"{"


class SafetensorsFile(Checkpoint):
    """One safetensors file.

    Not opened through the safetensors library: its get_tensor() touches each tensor, and with the kernel's
    read-around that was measured to read all of a 1.5 GB file from the disk at load time.
    """

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        entries, metadata, size = _read_header(path)
        super().__init__(path, entries, files=(path,), metadata=metadata)
        self._size = size
        self._storage: torch.UntypedStorage | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        entry = self.entries[name]
        if self._storage is None:
            self._storage = map_file(self.path, self._size)
        assert entry.offset is not None
        return mapped_tensor(self._storage, entry.offset, entry.nbytes, entry.dtype, entry.shape)


def _read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The entries, in the order of their bytes, the metadata, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise SourceError(
                f"{path} has a safetensors header of {length:,} bytes, the format allows {_HEADER_LIMIT:,}; "
                f"{AGAIN}"
            )
        if 8 + length > size:
            raise truncated(path, 8 + length, size, "its header alone")
        try:
            listed: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise SourceError(f"{path} has a damaged safetensors header; {AGAIN}") from error
    metadata = listed.pop("__metadata__", {})
    entries = {name: _entry(name, listing, path, 8 + length) for name, listing in listed.items()}
    expected = max((entry.offset + entry.nbytes for entry in entries.values()), default=8 + length)  # type: ignore[operator]
    if expected > size:
        raise truncated(path, expected, size, "what its header lists")
    return dict(sorted(entries.items(), key=lambda item: item[1].offset or 0)), metadata, size


def _entry(name: str, listing: Any, path: Path, begin: int) -> Entry:
    try:
        return _parse(listing, path, begin)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise SourceError(
            f"{path} lists {name} as {listing!r}, which cannot be mapped here ({error!r}); "
            f"{AGAIN}, or save it anew in a dtype that this torch has"
        ) from error


def _parse(listing: Any, path: Path, begin: int) -> Entry:
    """Raises ValueError, TypeError or LookupError for what the format does not allow."""
    start, end = (int(offset) for offset in listing["data_offsets"])
    shape = tuple(int(length) for length in listing["shape"])
    dtype: torch.dtype = getattr(torch, DTYPES[listing["dtype"]])
    if start < 0 or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError("offsets and shape disagree")
    return Entry(dtype, shape, end - start, path, begin + start)
