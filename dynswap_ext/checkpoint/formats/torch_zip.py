"""Zip files of ``torch.save``, mapped by ``torch.load(mmap=True)``."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynswap_ext._mappings import mappings
from dynswap_ext._subclasses import is_plain
from dynswap_ext.checkpoint.formats.common import AGAIN, first_line, opened
from dynswap_ext.checkpoint.formats.nested import find_state_dict
from dynswap_ext.checkpoint.formats.zip_records import Records
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return head[:4] == b"PK\x03\x04"


class TorchZip(Checkpoint):
    """One file of ``torch.save``: a state dict, or a dict that holds just one."""

    format = "torch"

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        with opened(path) as (descriptor, size):
            mappable = _check_records(path, descriptor, size)
            content = _load(path, weights_only, mappable)
            self._state = find_state_dict(path, content, _dimensions)
            mapped = _Mapped(path, os.fstat(descriptor).st_ino) if mappable else None
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


def _check_records(path: Path, descriptor: int, size: int) -> bool:
    """Whether the bytes can be used as they are in the file."""
    if not _has_directory(descriptor):
        raise SourceError(
            f"{path} is cut short: it begins as a zip file and ends, after {size:,} bytes, without the "
            f"directory of one; {AGAIN}"
        )
    try:
        records = Records(descriptor, 0, size)
        foreign = records.foreign_byte_order()
    except ValueError as error:
        raise SourceError(f"{path} is damaged, or no file of torch.save: {error}; {AGAIN}") from error
    if "constants.pkl" in records:
        raise SourceError(
            f"{path} is a TorchScript archive, which is a program; save its weights with "
            "torch.save(torch.jit.load(path).state_dict(), new_path)"
        )
    return not foreign


def _has_directory(descriptor: int) -> bool:
    with open(descriptor, "rb", closefd=False) as file:
        try:
            return zipfile.is_zipfile(file)
        except zipfile.BadZipFile:
            return True  # and what is wrong with it is found when it is read


def _load(path: Path, weights_only: bool, mappable: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mappable, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path} holds more than tensors, and is not unpickled because that may run any code: save just "
            "the weights with torch.save(model.state_dict(), path), or, if you would run any program of "
            f"whoever made it, say weights_only=False. Torch says: {_reason(error)}"
        ) from error
    except Exception as error:  # a damaged pickle can raise whatever there is
        raise SourceError(
            f"{path} is not a zip file of torch.save, or a damaged one: {first_line(error)}; "
            f"{AGAIN}, or save the weights anew"
        ) from error


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch found, without its advice around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    found = (line for line in lines if "GLOBAL" in line or line.startswith("WeightsUnpickler error"))
    return next(found, first_line(error))


def _dimensions(value: object) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


# ---- entries -----------------------------------------------------------------------------------------------


def _entry(tensor: torch.Tensor, path: Path, mapped: _Mapped | None) -> Entry:
    plain = is_plain(tensor) and tensor.layout is torch.strided
    offset = None
    if plain and mapped is not None and tensor.numel() and tensor.is_contiguous() and not _is_lazy(tensor):
        offset = mapped.offset(tensor.data_ptr())
    encoding = (
        "" if plain else type(tensor).__name__ if tensor.layout is torch.strided else str(tensor.layout)
    )
    return Entry(tensor.dtype, tuple(tensor.shape), _nbytes(tensor), path, offset, encoding)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the values are not the bytes but their conjugate or negative."""
    return tensor.is_conj() or tensor.is_neg()


def _nbytes(tensor: torch.Tensor) -> int:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return sum(_nbytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


class _Mapped:
    """Where in a file an address is. Torch maps the file, and does not say where it put it."""

    def __init__(self, path: Path, inode: int) -> None:
        self._ranges: list[tuple[int, int, int]] = []
        name = os.path.realpath(path)
        for mapping in mappings():
            # Some file systems give one inode two numbers, and a name may be escaped: one has to agree.
            if mapping.inode == inode or mapping.name == name:
                self._ranges.append((mapping.begin, mapping.end, mapping.offset))

    def offset(self, address: int) -> int | None:
        for start, end, offset in self._ranges:
            if start <= address < end:
                return address - start + offset
        return None
