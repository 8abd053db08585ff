"""What ``torch.save`` writes, as a file or as a part of one: mapped, and unpickled by torch."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler, serialization
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynswap_ext._swap.subclasses import is_plain
from dynswap_ext.checkpoint.formats.common import AGAIN, first_line, opened, pread
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.nested import find_state_dict
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: The zip format's local header of a record: its signature, and where flags and compression are.
_LOCAL_HEADER, _SIGNATURE, _FLAGS, _METHOD = 30, b"PK\x03\x04", slice(6, 8), slice(8, 10)
#: What it ends with.
_END_RECORD, _END_SIGNATURE = 22, b"PK\x05\x06"


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return head.startswith(_SIGNATURE)


class TorchZip(Checkpoint):
    """One file of ``torch.save``: a state dict, or a dict that holds just one."""

    format = "torch"

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        with opened(path) as (descriptor, size):
            mapped = map_file(path, descriptor, size)
            content = saved_object(path, descriptor, 0, mapped, weights_only)
        self._state = find_state_dict(path, content, _dimensions)
        tensors = {name: value for name, value in self._state.items() if isinstance(value, torch.Tensor)}
        super().__init__(
            path,
            {name: _entry(tensor, path, mapped) for name, tensor in tensors.items()},
            files=(path,),
            objects={name: value for name, value in self._state.items() if name not in tensors},
            versions=getattr(self._state, "_metadata", None),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        tensor: torch.Tensor = self._state[name]
        return tensor


def saved_object(
    path: Path, descriptor: int, offset: int, mapped: torch.UntypedStorage, weights_only: bool
) -> Any:
    """Return what ``torch.save`` wrote into a range of a file; its tensors are views of `mapped`, that range.

    They are in memory if the bytes have another order than this machine's. Code of the pickle runs only
    without `weights_only`.

    Raises
    ------
    SourceError
        It is damaged, compressed, a program, or holds more than may be unpickled. Names the file.
    """
    length = mapped.nbytes()
    file: Any = _FileRange(descriptor, offset, length)
    if file.pread(4, length - _END_RECORD) != _END_SIGNATURE:
        raise SourceError(
            f"{path} is cut short: what begins as a zip file ends, after {length:,} bytes, without the "
            f"directory of one; {AGAIN}"
        )
    try:
        records = torch._C.PyTorchFileReader(file)
        names = _check_records(records, file)
        if "constants.pkl" in names:
            raise SourceError(
                f"{path} is a TorchScript archive, which is a program; save its weights with "
                "torch.save(torch.jit.load(path).state_dict(), new_path)"
            )
        if "byteorder" in names and records.get_record("byteorder").decode() != sys.byteorder:
            file.seek(0)
            return torch.load(file, map_location="cpu", mmap=False, weights_only=weights_only)
        return _unpickled(records, mapped, weights_only)
    except SourceError:
        raise
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path} holds more than tensors, and is not unpickled because that may run any code: save just "
            "the weights with torch.save(model.state_dict(), path), or, if you would run any program of the "
            f"people who made it, say weights_only=False. Torch says: {_reason(error)}"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise SourceError(
            f"{path} is not a zip file of torch.save, or a damaged or cut one: {first_line(error)}; "
            f"{AGAIN}, or save the weights again"
        ) from error


def _check_records(records: Any, file: _FileRange) -> set[str]:
    """Return the names of a zip file's records. Raise ValueError if one cannot be used as it is."""
    names: list[str] = records.get_all_records()
    for name in names:
        header = file.pread(_LOCAL_HEADER, records.get_record_header_offset(name))
        # Torch takes the offset of a record for that of its bytes, whatever is done to them.
        if header[_METHOD] != b"\0\0" or header[_FLAGS][0] & 1:
            raise ValueError(f"its record {name} is compressed or encrypted")
    if len(found := set(names)) < len(names):
        raise ValueError(f"it has two records {next(name for name in found if names.count(name) > 1)}")
    return found


# Note [Torch's loader over our mapping]: torch.load(mmap=True) maps the file itself. So a file that is larger
# than RAM is refused (Note [Mapped without a reservation]), and the mapping is shared if the program has
# called torch.serialization.set_default_mmap_options(MAP_SHARED). Torch then calls `_load`, which has taken
# the mapping as an argument since torch 2.1; here it is called with a mapping of ours.
_torch_load: Any = serialization._load


def _unpickled(records: Any, mapped: torch.UntypedStorage, weights_only: bool) -> Any:
    forced = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    unpickler = _weights_only_unpickler if weights_only or forced else pickle
    return _torch_load(records, "cpu", unpickler, overall_storage=mapped, encoding="utf-8")


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch found, without its advice around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    found = (line for line in lines if "GLOBAL" in line or line.startswith("WeightsUnpickler error"))
    return next(found, first_line(error))


def _dimensions(value: object) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


class _FileRange(io.RawIOBase):
    """A range of an open file as a file of its own."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = to + (0, self._at, self._length)[whence]
        return self._at

    def pread(self, count: int, at: int) -> bytes:
        """Bytes from a place in the range, as far as there are any."""
        count = min(count, self._length - at)
        return pread(self._descriptor, count, self._offset + at) if count > 0 and at >= 0 else b""

    def readinto(self, buffer: Any) -> int:
        data = self.pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---- entries -----------------------------------------------------------------------------------------------


def offset_in(tensor: torch.Tensor, mapped: torch.UntypedStorage) -> int | None:
    """Return where a tensor's elements begin in a mapped file, None if they are not one range of it."""
    if not (
        is_plain(tensor) and tensor.layout is torch.strided and tensor.numel() and tensor.is_contiguous()
    ):
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None  # the values are not the bytes but their conjugate or negative
    offset = tensor.data_ptr() - mapped.data_ptr()
    return offset if 0 <= offset < mapped.nbytes() else None


def _entry(tensor: torch.Tensor, path: Path, mapped: torch.UntypedStorage) -> Entry:
    encoding = "" if is_plain(tensor) else type(tensor).__name__
    if tensor.layout is not torch.strided:
        encoding = str(tensor.layout)
    return Entry(
        tensor.dtype, tuple(tensor.shape), _nbytes(tensor), path, offset_in(tensor, mapped), encoding
    )


def _nbytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()
