"""Zip files of ``torch.save``, mapped and unpickled as ``torch.load(mmap=True)`` does it."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler, serialization
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynswap_ext._subclasses import is_plain
from dynswap_ext.checkpoint.formats.common import AGAIN, first_line, opened
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.formats.nested import find_state_dict
from dynswap_ext.checkpoint.formats.zip_records import Records
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError

#: Whether a file can be opened again by its descriptor; its name may be another file's by now.
_BY_DESCRIPTOR = os.path.isdir("/proc/self/fd")


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return head[:4] == b"PK\x03\x04"


class TorchZip(Checkpoint):
    """One file of ``torch.save``: a state dict, or a dict that holds just one."""

    format = "torch"

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        with opened(path) as (descriptor, size):
            mapped = map_file(path, descriptor, size) if _check_records(path, descriptor, size) else None
            content = _load(path, descriptor, mapped, weights_only)
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


def _load(path: Path, descriptor: int, mapped: torch.UntypedStorage | None, weights_only: bool) -> Any:
    """Unpickle the file. Its tensors are parts of `mapped`, or in memory if that is None."""
    try:
        return _unpickled(f"/proc/self/fd/{descriptor}" if _BY_DESCRIPTOR else path, mapped, weights_only)
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


# Note [Torch's loader over our mapping]: torch.load(mmap=True) maps the file itself. So a file that is larger
# than RAM is refused (Note [Mapped without a reservation]), and the mapping is shared if the program has
# called torch.serialization.set_default_mmap_options(MAP_SHARED). Torch then calls `_load`, which has taken
# the mapping as an argument since torch 2.1; here it is called with a mapping of ours.
_torch_load: Any = serialization._load


def _unpickled(file: str | Path, mapped: torch.UntypedStorage | None, weights_only: bool) -> Any:
    if mapped is None:
        return torch.load(file, map_location="cpu", mmap=False, weights_only=weights_only)
    forced = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    unpickler = _weights_only_unpickler if weights_only or forced else pickle
    with serialization._open_zipfile_reader(str(file)) as records:
        return _torch_load(records, "cpu", unpickler, overall_storage=mapped, encoding="utf-8")


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch found, without its advice around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    found = (line for line in lines if "GLOBAL" in line or line.startswith("WeightsUnpickler error"))
    return next(found, first_line(error))


def _dimensions(value: object) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


# ---- entries -----------------------------------------------------------------------------------------------


def _entry(tensor: torch.Tensor, path: Path, mapped: torch.UntypedStorage | None) -> Entry:
    plain = is_plain(tensor) and tensor.layout is torch.strided
    offset = None
    if plain and mapped is not None and tensor.numel() and tensor.is_contiguous() and not _is_lazy(tensor):
        offset = tensor.data_ptr() - mapped.data_ptr()
        if not 0 <= offset < mapped.nbytes():  # made by unpickling, and not in the file
            offset = None
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
