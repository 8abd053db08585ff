"""GGUF: key-values, then what there is of each tensor, then the tensors' bytes.

Read through the `gguf` package, an optional extra. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import errno
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from dynswap_ext.checkpoint.formats.common import (
    AGAIN,
    mapped_tensor,
    opened,
    pread,
    truncated,
)
from dynswap_ext.checkpoint.formats.file_mapping import map_file, refused
from dynswap_ext.checkpoint.gguf.encodings import ENCODINGS
from dynswap_ext.checkpoint.gguf.tensor import GGUFTensor
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

if TYPE_CHECKING:
    from dynswap_ext.checkpoint.gguf.header import Header, Listing

#: Tensors or key-values; the largest files have a few thousand. More is damage, and each would be an object.
_MOST_LISTED = 1 << 20
#: Values of a tensor, were none of its sides 0: torch counts elements and bytes in 63 bits.
_MOST_VALUES = 1 << 59

#: What is stored as it is, by ggml's names.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return head[:4] == b"GGUF"


class GGUFFile(Checkpoint):
    """One GGUF file, or all the files that a model was split into, whichever of them is named.

    Quantised entries are `GGUFTensor`: their blocks are mapped, nothing is decoded. `Entry.dtype` is then the
    dtype of the decoded values, `Entry.encoding` the type of the blocks.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        named = _read(path)
        files = _siblings(path, named.metadata)
        parts = {file: named if file == path else _read(file) for file in files}
        entries: dict[str, Entry] = {}
        for file, part in parts.items():
            for name, entry in part.entries.items():
                if name in entries:
                    raise SourceError(f"{file} lists {name}, and so does {entries[name].file}; {AGAIN}")
                entries[name] = entry
        # Of a model that was split, the first file has what is said of the whole.
        metadata = parts[files[0]].metadata
        super().__init__(path, entries, files=files, metadata=metadata)
        self._storages = {file: part.storage for file, part in parts.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        entry = self.entries[name]
        assert entry.offset is not None
        if entry.encoding and entry.encoding not in ENCODINGS:
            raise SourceError(
                f"{entry.file} has {name} as blocks of type {entry.encoding}, which are not decoded here, "
                f"only {', '.join(ENCODINGS)}; quantise the model to one of these (llama-quantize), or load "
                "its safetensors file"
            )
        storage = self._storages[entry.file]
        if not entry.encoding:
            return mapped_tensor(storage, entry.offset, entry.nbytes, entry.dtype, entry.shape)
        encoding = ENCODINGS[entry.encoding]
        shape = (*entry.shape[:-1], entry.shape[-1] // encoding.values * encoding.nbytes)
        blocks = mapped_tensor(storage, entry.offset, entry.nbytes, torch.uint8, shape)
        return GGUFTensor(blocks, entry.encoding, entry.dtype)


def _siblings(path: Path, metadata: dict[str, str]) -> tuple[Path, ...]:
    """The files of a model that was split (llama-gguf-split), in order; else the one."""
    said = metadata.get("split.count", "")
    count = int(said) if said.isdecimal() else 0
    if count <= 1:
        return (path,)
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[3]) != count:
        raise SourceError(
            f"{path} is one of {count} files of a model, and its name does not say which: give all of them "
            "their names back, as in model-00001-of-00003.gguf, or merge them with llama-gguf-split --merge"
        )
    files = tuple(path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1))
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise SourceError(
            f"{path} is one of {count} files of a model, and {len(missing)} of them are not beside it "
            f"({', '.join(missing[:5])}); download those as well"
        )
    return files


# ---- the header --------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What one file says."""

    entries: dict[str, Entry]  # in the order of their bytes
    metadata: dict[str, str]
    storage: torch.UntypedStorage


def _read(path: Path) -> _Part:
    with opened(path) as (descriptor, size):
        _check_start(path, descriptor, size)
        header = _header(path, size)
        storage = map_file(path, descriptor, size)
    entries = {
        name: _entry(name, listing, header.begin, path, size) for name, listing in header.tensors.items()
    }
    entries = dict(sorted(entries.items(), key=lambda item: item[1].offset or 0))
    _check_overlaps(path, entries)
    return _Part(entries, header.metadata, storage)


def _check_start(path: Path, descriptor: int, size: int) -> None:
    """What has to be known before anything is counted or allocated by the file's own numbers."""
    if size < 24:
        raise truncated(path, 24, size, "the header of a GGUF file")
    version, tensors, pairs = struct.unpack("<4xIQQ", pread(descriptor, 24, 0))
    if version & 0xFFFF == 0:
        raise SourceError(
            f"{path} is a big-endian GGUF file; convert it with gguf-convert-endian (of the gguf package)"
        )
    if version not in (2, 3):
        raise SourceError(
            f"{path} is a GGUF file of version {version}, 2 and 3 are read here; convert the model anew with "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    if max(tensors, pairs) > _MOST_LISTED:
        raise SourceError(
            f"{path} has a damaged header: it declares {tensors:,} tensors and {pairs:,} key-values; {AGAIN}"
        )


def _header(path: Path, size: int) -> Header:
    try:
        from dynswap_ext.checkpoint.gguf.header import Header
    except ImportError as error:
        raise SourceError(
            f"{path} is a GGUF file, and the package that reads them is not here ({error}); install it with "
            "`pip install dynswap-ext[gguf]`"
        ) from error
    try:
        return Header(path)
    except Exception as error:  # of many kinds, as the package indexes into whatever the file says
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise refused(path, size, error) from error
        raise SourceError(f"{path} has a damaged or cut GGUF header ({error!r}); {AGAIN}") from error


def _entry(name: str, listing: Listing, begin: int, path: Path, size: int) -> Entry:
    kind, shape, offset, values, nbytes = listing
    if math.prod(max(1, side) for side in shape) > _MOST_VALUES:
        raise SourceError(f"{path} lists {name} with the shape {list(shape)}; {AGAIN}")
    row = shape[-1] if shape else 1
    if row % values:
        raise SourceError(
            f"{path} lists {name} as {kind} of shape {list(shape)}, whose rows are not whole blocks of "
            f"{values} values; {AGAIN}"
        )
    length = math.prod(shape) // values * nbytes
    if begin + offset + length > size:
        raise truncated(path, begin + offset + length, size, f"{name} ({kind}, {list(shape)})")
    if kind in DTYPES:
        return Entry(DTYPES[kind], shape, length, path, begin + offset)
    return Entry(torch.float32, shape, length, path, begin + offset, encoding=kind)


def _check_overlaps(path: Path, entries: dict[str, Entry]) -> None:
    last, end = "", 0
    for name, entry in entries.items():
        if entry.nbytes and entry.offset is not None:
            if entry.offset < end:
                raise SourceError(f"{path} has a damaged header: {last} and {name} overlap; {AGAIN}")
            last, end = name, entry.offset + entry.nbytes
