"""GGUF: key-values, then what there is of each tensor, then the tensors' bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Types are looked up in the `gguf`
package, an optional extra. Its own reader makes an object for each token of a vocabulary, which takes more
than 10 s and 600 MB for Llama 3's (gguf 0.19, a core of a Xeon).
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN, mapped_tensor, opened, pread, truncated
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.gguf_tensors.encodings import ENCODINGS
from dynswap_ext.checkpoint.gguf_tensors.tensor import GGUFTensor
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: Tensors or key-values; the largest files have a few thousand. More is damage, and each would be an object.
_MOST_LISTED = 1 << 20
#: Elements of an array, and bytes of a text: a vocabulary has some hundred thousand. More is damage too.
_MOST_ELEMENTS = 1 << 26
#: Values of a tensor, were none of its sides 0: torch counts elements and bytes in 63 bits.
_MOST_VALUES = 1 << 59
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
#: Elements of an array that are kept as text; of longer ones only what and how many they are.
_KEPT = 16

#: Types of values, in the order of their numbers, and the format of each for `struct`.
_VALUES = tuple(
    "uint8 int8 uint16 int16 uint32 int32 float32 bool string array uint64 int64 float64".split()  # noqa: SIM905
)
_FORMATS = "BbHhIif?__Qqd"
_UINT32, _STRING, _ARRAY = map(_VALUES.index, ("uint32", "string", "array"))

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
        # Of a model that was split, the first file has the metadata of the whole.
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
    text = metadata.get("split.count", "")
    count = int(text) if text.isdecimal() else 0
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
            f"{path} is one of {count} files of a model, and {len(missing)} of them are not in its folder "
            f"({', '.join(missing[:5])}); download those as well"
        )
    return files


# ---- the header --------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What one file has."""

    entries: dict[str, Entry]  # in the order of their bytes
    metadata: dict[str, str]
    storage: torch.UntypedStorage


def _read(path: Path) -> _Part:
    with opened(path) as (descriptor, size):
        if size < 24:
            raise truncated(path, 24, size, "the header of a GGUF file")
        version, tensors, pairs = struct.unpack("<4xIQQ", pread(descriptor, 24, 0))
        if version & 0xFFFF == 0:
            raise SourceError(
                f"{path} is a big-endian GGUF file; convert it with gguf-convert-endian (of the gguf package)"
            )
        if version not in (2, 3):
            raise SourceError(
                f"{path} is a GGUF file of version {version}, 2 and 3 are read here; convert the model again "
                "with llama.cpp's convert_hf_to_gguf.py"
            )
        storage, types = map_file(path, descriptor, size), _block_types(path)
        entries: dict[str, Entry] = {}
        try:
            if max(tensors, pairs) > _MOST_LISTED:
                raise ValueError(f"it declares {tensors:,} tensors and {pairs:,} key-values")
            header = _Header(descriptor, size)
            metadata = header.metadata(pairs)
            listed = [header.listing(types) for _ in range(tensors)]
            begin = header.end()
            for listing in listed:
                if listing.name in entries:
                    raise ValueError(f"{listing.name} is listed twice")
                entries[listing.name] = _entry(listing, begin, path, size)
            entries = dict(sorted(entries.items(), key=lambda item: item[1].offset or 0))
            last, end = "", 0
            for name, entry in entries.items():
                if entry.nbytes and entry.offset is not None:
                    if entry.offset < end:
                        raise ValueError(f"{last} and {name} overlap")
                    last, end = name, entry.offset + entry.nbytes
        except SourceError:
            raise
        except Exception as error:  # of many kinds, as it follows the file's own numbers
            reason = error if type(error) is ValueError else repr(error)
            raise SourceError(f"{path} has a damaged or cut GGUF header: {reason}; {AGAIN}") from error
    return _Part(entries, metadata, storage)


def _block_types(path: Path) -> dict[int, tuple[str, int, int]]:
    """Return ggml's types by number: the name, and the values and bytes of a block."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise SourceError(
            f"{path} is a GGUF file, and the package that knows its types is not here ({error}); install it "
            "with `pip install dynswap-ext[gguf]`"
        ) from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Listing(NamedTuple):
    name: str
    shape: tuple[int, ...]  # as torch has it
    kind: str
    values: int  # of one block
    nbytes: int  # of one block
    offset: int  # from where tensors begin


class _Header:
    """Reads a header in order. Any error is one of the file's."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._file = open(descriptor, "rb", closefd=False)  # noqa: SIM115
        self._size, self._alignment = size, 32
        self._file.seek(24)

    def metadata(self, count: int) -> dict[str, str]:
        """The key-values, as text: of long arrays the number of elements."""
        found: dict[str, str] = {}
        for _ in range(count):
            name, kind = self._text(), self._number("I")
            if name in found:
                raise ValueError(f"{name} is there twice")
            value: Any = self._array() if kind == _ARRAY else self._value(kind)
            found[name] = str(value)
            if name == "general.alignment":
                if kind != _UINT32 or value <= 0 or value & (value - 1):
                    raise ValueError(f"the alignment {value} is no power of two")
                self._alignment = value
        return found

    def listing(self, types: dict[int, tuple[str, int, int]]) -> _Listing:
        """The next tensor."""
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions:,} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))  # the innermost is first
        kind, offset = self._number("I"), self._number("Q")
        if kind not in types:
            raise ValueError(f"{name} has the type {kind}")
        return _Listing(name, shape, *types[kind], offset)

    def end(self) -> int:
        """Where the tensors' bytes begin, in bytes from the start of the file."""
        return -(-self._file.tell() // self._alignment) * self._alignment

    def _array(self) -> str:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("an array is one of arrays")  # ggml has none
        self._check(count)
        if count <= _KEPT:
            return json.dumps([self._value(kind) for _ in range(count)], ensure_ascii=False)
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        else:
            self._skip(count * struct.calcsize(_FORMATS[kind]))
        return f"{count:,} x {_VALUES[kind]}"

    def _value(self, kind: int) -> Any:
        if kind >= len(_FORMATS) or kind == _ARRAY:
            raise ValueError(f"a value has the type {kind}")
        return self._text() if kind == _STRING else self._number(_FORMATS[kind])

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._file.read(struct.calcsize(code)))[0]

    def _text(self) -> str:
        length = self._number("Q")
        self._check(length)
        begin = self._file.tell()
        data = self._file.read(length)
        if len(data) < length:
            raise ValueError(f"what begins at byte {begin:,} ends at {begin + length:,}, after the file")
        return data.decode()

    def _skip(self, count: int) -> None:
        if self._file.seek(count, 1) > self._size:
            raise ValueError("an array ends after the file")

    @staticmethod
    def _check(count: int) -> None:
        if count > _MOST_ELEMENTS:
            raise ValueError(f"something has {count:,} elements")


def _entry(listing: _Listing, begin: int, path: Path, size: int) -> Entry:
    name, shape, kind, values, nbytes, offset = listing
    if math.prod(max(1, side) for side in shape) > _MOST_VALUES:
        raise ValueError(f"it lists {name} with the shape {list(shape)}")
    if (shape[-1] if shape else 1) % values:
        raise ValueError(
            f"it lists {name} as {kind} of shape {list(shape)}, whose rows are not whole blocks of {values} "
            "values"
        )
    length = math.prod(shape) // values * nbytes
    if begin + offset + length > size:
        raise truncated(path, begin + offset + length, size, f"{name} ({kind}, {list(shape)})")
    if kind in DTYPES:
        return Entry(DTYPES[kind], shape, length, path, begin + offset)
    return Entry(torch.float32, shape, length, path, begin + offset, encoding=kind)
