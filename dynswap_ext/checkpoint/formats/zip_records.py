"""Where the bytes of a tensor lie in a zip file of ``torch.save``, be it a file or a part of one."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import pread
from dynswap_ext.checkpoint.formats.restricted_pickle import restricted_loads

#: A local header of the zip format: signature, 22 bytes, and the lengths of what follows up to the data.
_LOCAL_HEADER, _SIGNATURE = 30, b"PK\x03\x04"

#: The pickle of one tensor is some 200 bytes.
_PICKLE_LIMIT = 1 << 16


class Records:
    """The directory of a zip file that occupies a range of a file.

    Raises
    ------
    ValueError
        It is no zip file, or a damaged or compressed one. Says which.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        try:
            with zipfile.ZipFile(_Range(descriptor, offset, length)) as directory:
                listed = directory.infolist()
        except OSError:
            raise
        except Exception as error:  # BadZipFile, and whatever else zipfile makes of a damaged one
            raise ValueError(f"its directory of records is damaged ({error})") from error
        self._records: dict[str, zipfile.ZipInfo] = {}
        for record in listed:
            # What is before the first slash is the file's name when it was saved.
            name = record.filename.partition("/")[2]
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"its record {name} is compressed or encrypted")
            if name in self._records:
                raise ValueError(f"it has two records {name}")
            self._records[name] = record

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def find(self, name: str) -> tuple[int, int]:
        """Where a record's bytes begin in the file, and how many there are.

        Raises
        ------
        ValueError
            There is no such record, or it lies outside of the zip file.
        """
        record = self._records.get(name)
        if record is None:
            raise ValueError(f"it has no record {name}")
        if record.header_offset < 0:
            raise ValueError(f"its record {name} begins before the file does")
        header = pread(self._descriptor, _LOCAL_HEADER, self._offset + record.header_offset)
        if len(header) < _LOCAL_HEADER or header[:4] != _SIGNATURE:
            raise ValueError(f"its record {name} is not where its directory says")
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        begin = record.header_offset + _LOCAL_HEADER + names
        if record.file_size != record.compress_size or begin + record.file_size > self._length:
            raise ValueError(f"its record {name} does not end before the file does")
        return self._offset + begin, record.file_size

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a small record. Raises ValueError as `find` does, and for one larger than `limit`."""
        offset, length = self.find(name)
        if length > limit:
            raise ValueError(f"its record {name} has {length:,} bytes, expected at most {limit:,}")
        return pread(self._descriptor, length, offset)

    def foreign_byte_order(self) -> bool:
        """Whether it was written on a machine with the other order of bytes."""
        return "byteorder" in self and self.read("byteorder", 16).decode("ascii", "replace") != sys.byteorder


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The one tensor of a zip file, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: From the start of the file that the zip file is in, in bytes.
    offset: int


def saved_tensor(descriptor: int, offset: int, length: int) -> SavedTensor | None:
    """Finds the tensor that ``torch.save(tensor, file)`` wrote into a range of a file.

    Returns
    -------
    SavedTensor or None
        None if it cannot be mapped as it is: not contiguous, of a subclass, or of the other byte order.

    Raises
    ------
    ValueError
        The range has no such zip file, or a damaged one. Says which.
    """
    records = Records(descriptor, offset, length)
    try:
        saved = restricted_loads(records.read("data.pkl", _PICKLE_LIMIT), _NAMES, _storage)
    except pickle.UnpicklingError:
        return None  # torch.load is to judge it
    if not isinstance(saved, _Strided) or records.foreign_byte_order():
        return None
    dtype, key = saved.storage
    begin, available = records.find(f"data/{key}")
    count = 1
    for size, stride in zip(reversed(saved.shape), reversed(saved.strides), strict=True):
        if size != 1 and stride != count:
            return None
        count *= size
    if (saved.start + count) * dtype.itemsize > available:
        raise ValueError(f"its tensor needs more bytes than the {available:,} that it has")
    return SavedTensor(dtype, saved.shape, begin + saved.start * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Strided:
    storage: tuple[torch.dtype, str]
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_v2(storage: Any, start: Any, shape: Any, strides: Any, *_gradient: Any) -> _Strided:
    lengths = (start, *shape, *strides)
    if type(storage) is not tuple or any(type(length) is not int or length < 0 for length in lengths):
        raise TypeError("no tensor")
    return _Strided(storage, start, tuple(shape), tuple(strides))


def _rebuild_v3(
    storage: Any, start: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_more: Any
) -> _Strided:
    """The same for dtypes without a storage class of their own, such as the 8-bit floats."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    return _rebuild_v2((dtype, storage[1]), start, shape, strides)


def _no_hooks() -> None:
    """Backward hooks, of which no saved tensor has any."""


def _storage(persistent_id: Any) -> tuple[torch.dtype, str]:
    kind, dtype, key, *_ = persistent_id
    if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
        raise TypeError("no storage")
    return dtype, key


#: What the pickle of a plain tensor calls. A storage class stands for its dtype.
_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "collections.OrderedDict": _no_hooks,
    "torch.storage.UntypedStorage": torch.uint8,
    **{
        f"torch.{name}Storage": dtype
        for name, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexFloat": torch.complex64,
            "ComplexDouble": torch.complex128,
        }.items()
    },
}


class _Range(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        at = to + (self._at if whence == os.SEEK_CUR else self._length if whence == os.SEEK_END else 0)
        if at < 0:
            raise ValueError(f"byte {at} is before the start")
        self._at = at
        return at

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = pread(
            self._descriptor,
            left if count is None or count < 0 else min(count, left),
            self._offset + self._at,
        )
        self._at += len(data)
        return data
