"""The header of a GGUF file, parsed by the `gguf` package. Imported only when such a file is opened."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

__all__ = ["Header", "Listing"]

#: ggml's name of the type, the shape as torch has it, the offset from where tensors begin, and the values and
#: bytes of one block.
Listing = tuple[str, tuple[int, ...], int, int, int]

#: Elements of an array that are kept as text; of longer ones only what and how many they are.
_KEPT = 16
#: Elements of an array, and bytes of a text: a vocabulary has some hundred thousand, a chat template some
#: thousand. More is damage, and all of it would be looked at.
_MOST_ELEMENTS = 1 << 26
#: GGML_MAX_DIMS.
_MOST_DIMENSIONS = 4


class Header:
    """What stands before the tensors' bytes.

    Attributes
    ----------
    tensors
        A `Listing` of each, by name.
    begin
        Where the tensors' bytes begin, in bytes from the start of the file.
    metadata
        The key-values as text: long arrays as a count.
    """

    def __init__(self, path: Path) -> None:
        reader = _Reader(path)
        self.tensors: dict[str, Listing] = reader.listed
        self.begin = int(reader.data_offset)
        self.metadata = {
            name: _text(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Makes no object for each token of a vocabulary, and believes no number that leads out of the file.

    Without this, the header of a model with Llama 3's vocabulary takes more than 10 s and 600 MB (gguf 0.19,
    a core of a Xeon; with it 0.1 s), and a damaged length reads all of the file.
    """

    listed: dict[str, Listing]

    def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
        if count > _MOST_ELEMENTS:
            raise ValueError(f"what begins at byte {offset:,} has {count:,} elements")
        self._check_end(int(offset), int(offset) + int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, *order, **named)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        if count > _MOST_ELEMENTS:
            raise ValueError(f"the array at byte {orig_offs:,} has {count:,} elements")
        if kind == GGUFValueType.ARRAY:
            raise ValueError(f"the array at byte {orig_offs:,} is one of arrays")  # ggml has none
        if count <= _KEPT:
            return super()._get_field_parts(orig_offs, raw_type)
        first = orig_offs + 12
        if kind == GGUFValueType.STRING:
            end = self._after_strings(first, count)
        else:
            end = first + count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        self._check_end(orig_offs, end)
        said = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        return end - orig_offs, said, [], [GGUFValueType.ARRAY, kind]

    def _after_strings(self, offset: int, count: int) -> int:
        length, view = struct.Struct("<Q"), memoryview(self.data)
        for _ in range(count):
            offset += 8 + length.unpack_from(view, offset)[0]
        return offset

    def _check_end(self, offset: int, end: int) -> None:
        if end > self.data.size:
            raise ValueError(
                f"what begins at byte {offset:,} ends at {end:,}, the file at {self.data.size:,}"
            )

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        # The base class makes a view of each tensor's bytes; they are mapped here in another way.
        self.listed = {}
        for field in fields:
            _, _, _, dims, kind, offset = field.parts
            if field.name in self.listed:
                raise ValueError(f"{field.name} is listed twice")
            if len(dims) > _MOST_DIMENSIONS:
                raise ValueError(f"{field.name} has {len(dims):,} dimensions")
            encoding = GGMLQuantizationType(int(kind[0]))
            shape = tuple(reversed(dims.tolist()))  # ggml's first dimension is the innermost
            self.listed[field.name] = (encoding.name, shape, int(offset[0]), *GGML_QUANT_SIZES[encoding])


def _text(field: gguf.ReaderField) -> str:
    if field.types[0] != GGUFValueType.ARRAY:
        return str(field.contents())
    if field.data:
        return json.dumps(field.contents(), ensure_ascii=False)
    count = int(field.parts[4][0])  # after the key's length, the key, the type, and the elements' type
    return f"{count:,} x {field.types[1].name.lower()}" if count else "[]"
