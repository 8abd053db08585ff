"""Opens GGUF files: key-values, then a list of the tensors, then the tensors' bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package, an optional extra,
tells the types of blocks. Its own reader is not used, as it makes an object for each token of a vocabulary.
For Llama 3's that takes more than 10 s and 600 MB (gguf 0.19, a core of a Xeon).
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynswap_ext._util.listing import listed
from dynswap_ext.checkpoint.formats.common import AGAIN, mapped_tensor, opened, pread, truncated
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.safetensors_file import DTYPES
from dynswap_ext.checkpoint.formats.sharded import joined
from dynswap_ext.checkpoint.gguf_tensors.encodings import encoding_of
from dynswap_ext.checkpoint.gguf_tensors.tensor import GGUFTensor
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import ConfigError, SourceError

#: The most tensors, or key-values. The largest files have a few thousand, so a larger number means damage.
_MOST_LISTED = 1 << 20
#: The most elements of an array, or bytes of a text. A vocabulary has some hundred thousand.
_MOST_ELEMENTS = 1 << 26
#: The most values of a tensor, with sides of 0 counted as 1. Torch counts elements and bytes in 63 bits.
_MOST_VALUES = 1 << 59
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
#: Arrays of up to so many elements are kept as text; of longer ones, only the type and the length.
_KEPT = 16

#: For `struct`, the format of each type of value, in the order of the types' numbers.
_FORMATS = "BbHhIif?__Qqd"
_STRING, _ARRAY = 8, 9


def read_gguf(path: Path) -> Checkpoint:
    """Return the checkpoint of a GGUF file. For a model that was split into several, any of them opens all.

    Quantised entries are `GGUFTensor`: their blocks are mapped, and not decoded. Then `Entry.dtype` is the
    dtype of the decoded values, and `Entry.encoding` the type of the blocks.
    """
    named = _read_file(path)
    parts = {file: named if file == path else _read_file(file) for file in _siblings(path, named.metadata)}
    places: dict[str, Path] = {}
    for file, part in parts.items():
        for name in part.entries:
            if places.setdefault(name, file) != file:
                raise SourceError(f"{file} lists {name}, and so does {places[name]}; {AGAIN}")
    return joined(path, "gguf", parts)  # the first file has the metadata of the whole model


def _siblings(path: Path, metadata: dict[str, str]) -> list[Path]:
    """Return all files of a model that llama-gguf-split has split, in order; `path` alone for other files."""
    text = metadata.get("split.count", "")
    count = int(text) if text.isdecimal() else 0
    if count <= 1:
        return [path]
    named = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if named is None or int(named[3]) != count:
        raise SourceError(
            f"{path} is one of {count} files of a model, and its name does not say which: give all of them "
            "their names back, as in model-00001-of-00003.gguf, or merge them with llama-gguf-split --merge"
        )
    files = [path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise SourceError(
            f"{path} is one of {count} files of a model, and {len(missing)} of them are not in its folder "
            f"({listed(missing)}); download those as well"
        )
    return files


def _read_file(path: Path) -> Checkpoint:
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
        storage = map_file(path, descriptor, size)
        try:
            if max(tensors, pairs) > _MOST_LISTED:
                raise ValueError(f"it declares {tensors:,} tensors and {pairs:,} key-values")
            header = _Header(path, descriptor, size)
            metadata = header.metadata(pairs)
            entries = header.entries(tensors, int(metadata.get("general.alignment", "32")))
        except SourceError:
            raise
        except Exception as error:  # numbers in a damaged file can cause any error
            reason = error if type(error) is ValueError else repr(error)
            raise SourceError(f"{path} has a damaged or cut GGUF header: {reason}; {AGAIN}") from error

    def tensor(name: str) -> torch.Tensor:
        entry = entries[name]
        if not entry.encoding:
            return mapped_tensor(storage, entry)
        try:
            encoding = encoding_of(entry.encoding)
        except ConfigError as error:
            raise SourceError(f"{path} cannot give {name}: {error}") from error
        shape = (*entry.shape[:-1], entry.shape[-1] // encoding.values * encoding.nbytes)
        blocks = mapped_tensor(storage, replace(entry, dtype=torch.uint8, shape=shape))
        return GGUFTensor(blocks, entry.encoding, entry.dtype)

    return Checkpoint(path, "gguf", entries, files=(path,), tensor=tensor, metadata=metadata)


class _Header:
    """Reads the header of a GGUF file from front to back: first `metadata`, then `entries`.

    Raises SourceError if the package `gguf` is missing.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        try:
            from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
        except ImportError as error:
            raise SourceError(
                f"{path} is a GGUF file, and the package that knows its types is not here ({error}); install "
                "it with `pip install dynswap-ext[gguf]`"
            ) from error
        #: By the number of each type of blocks: its name, and the values and bytes of a block.
        self._blocks = {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
        self._kinds: Any = GGUFValueType
        self._path, self._size = path, size
        self._file = open(descriptor, "rb", closefd=False)  # noqa: SIM115
        self._file.seek(24)

    def metadata(self, count: int) -> dict[str, str]:
        """Read the key-values, and return them as text. A long array is given by its length and type."""
        found: dict[str, str] = {}
        for _ in range(count):
            name, kind = self._text(), self._number("I")
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = str(self._array() if kind == _ARRAY else self._value(kind))
        return found

    def entries(self, count: int, alignment: int) -> dict[str, Entry]:
        """Read the list of tensors, and return it sorted by offset. ValueError if tensors overlap."""
        listed = [self._entry() for _ in range(count)]
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"the alignment {alignment} is no power of two")
        begin = -(-self._file.tell() // alignment) * alignment
        entries: dict[str, Entry] = {}
        last, end = "", 0
        for offset, name, entry in sorted(listed, key=lambda item: item[0]):
            if name in entries:
                raise ValueError(f"{name} is listed twice")
            start, stop = begin + offset, begin + offset + entry.nbytes
            if stop > self._size:
                raise truncated(self._path, stop, self._size, f"{name} of shape {list(entry.shape)}")
            if entry.nbytes:
                if start < end:
                    raise ValueError(f"{last} and {name} overlap")
                last, end = name, stop
            entries[name] = replace(entry, offset=start)
        return entries

    def _entry(self) -> tuple[int, str, Entry]:
        """Read one item of the list: a tensor's offset from the first tensor, its name, and its entry.

        The entry has no offset yet.
        """
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions:,} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))  # the file has them reversed
        number, offset = self._number("I"), self._number("Q")
        if number not in self._blocks:
            raise ValueError(f"{name} has the type {number}")
        kind, values, nbytes = self._blocks[number]
        if math.prod(max(1, side) for side in shape) > _MOST_VALUES:
            raise ValueError(f"it lists {name} with the shape {list(shape)}")
        if (shape[-1] if shape else 1) % values:
            raise ValueError(
                f"it lists {name} as {kind} of shape {list(shape)}, whose rows are not whole blocks of "
                f"{values} values"
            )
        dtype, encoding = (DTYPES[kind], "") if kind in DTYPES else (torch.float32, kind)
        length = math.prod(shape) // values * nbytes
        return offset, name, Entry(dtype, shape, length, self._path, None, encoding)

    def _array(self) -> str:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ValueError("an array is one of arrays")  # which ggml does not have
        if count <= _KEPT:
            return json.dumps([self._value(kind) for _ in range(count)], ensure_ascii=False)
        self._check(count)
        for _ in range(count if kind == _STRING else 1):
            length = self._number("Q") if kind == _STRING else count * struct.calcsize(_FORMATS[kind])
            if self._file.seek(length, 1) > self._size:
                raise ValueError("an array ends after the file")
        return f"{count:,} x {self._kinds(kind).name.lower()}"

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

    @staticmethod
    def _check(count: int) -> None:
        if count > _MOST_ELEMENTS:
            raise ValueError(f"something has {count:,} elements")
