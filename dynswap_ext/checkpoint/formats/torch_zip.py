"""Opens what ``torch.save`` writes, as a file or as a part of one: mapped, and unpickled by torch."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import _weights_only_unpickler, serialization

from dynswap_ext._swap.subclasses import is_plain
from dynswap_ext._util.places import stored_bytes
from dynswap_ext.checkpoint.formats.common import AGAIN, opened, pread, shown
from dynswap_ext.checkpoint.formats.file_mapping import map_file
from dynswap_ext.checkpoint.reader import LOSSLESS, Checkpoint, Entry
from dynswap_ext.errors import SourceError
from dynswap_ext.lossless.tensor import LosslessTensor


def read_torch(path: Path, weights_only: bool) -> Checkpoint:
    """Return the checkpoint of one file of ``torch.save``: a state dict, or dicts that contain just one."""
    with opened(path) as (descriptor, size):
        mapped = map_file(path, descriptor, size)
        content = saved_object(path, descriptor, 0, mapped, weights_only)
    state = find_state_dict(path, content, torch.Tensor)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return Checkpoint(
        path,
        "torch",
        entries={name: _entry(tensor, path, mapped) for name, tensor in tensors.items()},
        files=(path,),
        tensor=tensors.__getitem__,
        objects={name: value for name, value in state.items() if name not in tensors},
        versions=getattr(state, "_metadata", None),
    )


# Note [Torch's loader over our mapping]: torch.load(mmap=True) maps the file itself. Then a file that is
# larger than RAM is refused (Note [Mapped without a reservation]), and the mapping is shared if the program
# has called torch.serialization.set_default_mmap_options(MAP_SHARED). After mapping, torch calls `_load`,
# which has taken the mapping as an argument since torch 2.1. Here it is called with our own mapping.
_torch_load: Any = serialization._load


def saved_object(
    path: Path, descriptor: int, offset: int, mapped: torch.UntypedStorage, weights_only: bool
) -> Any:
    """Unpickle what ``torch.save`` wrote into a range of a file, with tensors that are views of `mapped`.

    The range begins at `offset`, and `mapped` is its mapping. If the file's byte order is not this machine's,
    the tensors are in memory instead. Code of the pickle runs only without `weights_only`.

    Raises
    ------
    SourceError
        The range is damaged, compressed, a TorchScript program, or holds more than may be unpickled. Names
        the file.
    """
    file: Any = _FileRange(descriptor, offset, mapped.nbytes())
    forced = os.getenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    unpickler = _weights_only_unpickler if weights_only or forced else pickle
    try:
        _check_records(file)
        file.seek(0)
        records: Any = torch._C.PyTorchFileReader(file)
        if records.has_record("constants.pkl"):
            raise SourceError(
                f"{path} is a TorchScript archive, which is a program; save its weights with "
                "torch.save(torch.jit.load(path).state_dict(), new_path)"
            )
        if records.has_record("byteorder") and records.get_record("byteorder").decode() != sys.byteorder:
            file.seek(0)
            return torch.load(file, map_location="cpu", mmap=False, weights_only=weights_only)
        return _torch_load(records, "cpu", unpickler, overall_storage=mapped, encoding="utf-8")
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
            f"{path} is not a zip file of torch.save, or is cut short or damaged: {_reason(error)}; "
            f"{AGAIN}, or save the weights again"
        ) from error


def _check_records(file: Any) -> None:
    """Raise ValueError if a zip file has a compressed or encrypted record, or two of one name.

    Torch would take the bytes of such a record for the data of a tensor.
    """
    with zipfile.ZipFile(file) as archive:
        names: set[str] = set()
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
                raise ValueError(f"its record {record.filename} is compressed or encrypted")
            if record.filename in names:
                raise ValueError(f"it has two records {record.filename}")
            names.add(record.filename)


def _reason(error: Exception) -> str:
    """Return the line of a torch error that says what is wrong, without advice and C++ stack."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    found = (line for line in lines if "GLOBAL" in line or line.startswith("WeightsUnpickler error"))
    return next(found, lines[0])


class _FileRange(io.RawIOBase):
    """A range of an open file that can be read as if it were a whole file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        at: int = to + (0, self._at, self._length)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # like a real file, as zipfile expects
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        data = pread(self._descriptor, count, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---- entries -----------------------------------------------------------------------------------------------


def offset_in(tensor: torch.Tensor, mapped: torch.UntypedStorage) -> int | None:
    """Return the offset of a tensor's elements in a mapped file; None if they are not one range of it."""
    if not is_plain(tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
        return None  # there are no values, or they are not the bytes but their conjugate or negative
    offset = tensor.data_ptr() - mapped.data_ptr()
    return offset if 0 <= offset < mapped.nbytes() else None


def _entry(tensor: torch.Tensor, path: Path, mapped: torch.UntypedStorage) -> Entry:
    if isinstance(tensor, LosslessTensor) and tensor.is_whole():
        place = offset_in(cast("torch.Tensor", tensor.coded), mapped)
        return Entry(tensor.dtype, tuple(tensor.shape), stored_bytes(tensor), path, place, LOSSLESS)
    encoding = "" if is_plain(tensor) else type(tensor).__name__
    if tensor.layout is not torch.strided:
        encoding = str(tensor.layout)
    return Entry(
        tensor.dtype, tuple(tensor.shape), stored_bytes(tensor), path, offset_in(tensor, mapped), encoding
    )


# ---- which part is the model's -----------------------------------------------------------------------------

#: Levels of dicts to search. People nest no deeper than {"app": {"model": state_dict, ...}}, and deeper dicts
#: belong to optimizers.
_DEPTH = 2


def find_state_dict(path: Path, content: object, tensor: type[Any]) -> dict[str, Any]:
    """Return the state dict in `content`: all of it, the only state dict nested in it, or its own tensors.

    `tensor` is the type of the values that stand for tensors. They have a `shape`.

    Raises
    ------
    SourceError
        `content` has no state dict, or more than one. Names them.
    """

    def belongs(key: object, value: object) -> bool:
        return isinstance(key, str) and (key.endswith("_extra_state") or isinstance(value, tensor))

    def has_weights(state: dict[Any, Any]) -> bool:
        # A tensor without dimensions may be a counter, as in {"step": tensor(3)}.
        return any(isinstance(value, tensor) and len(value.shape) for value in state.values())

    own: dict[str, Any] = content if isinstance(content, dict) else {}
    tensors = {key: value for key, value in own.items() if belongs(key, value)}
    if isinstance(content, dict) and len(tensors) == len(own):
        return own
    levels: list[dict[str, dict[str, Any]]] = []  # the state dicts at each depth, by name
    dicts = {"": own}
    for _ in range(_DEPTH):
        dicts = {
            f"{name}.{key}" if name else f"{key}": inner
            for name, value in dicts.items()
            for key, inner in value.items()
            if isinstance(inner, dict) and inner
        }
        levels.append(
            {name: state for name, state in dicts.items() if all(map(belongs, state, state.values()))}
        )
    with_weights = [{name: state for name, state in level.items() if has_weights(state)} for level in levels]
    if not any(with_weights) and has_weights(tensors):
        return tensors
    nearest = next(filter(None, [*with_weights, *levels]), {})
    if len(nearest) == 1:
        return next(iter(nearest.values()))
    if nearest:
        raise SourceError(
            f"{path} has {len(nearest)} state dicts ({', '.join(nearest)}), and which is meant is unclear: "
            "save the one that is meant alone, as the file or folder is saved now"
        )
    holds = f" with {', '.join(shown(key) for key in list(own)[:5])}" if own else ""
    raise SourceError(
        f"{path} has no state dict (it holds a {type(content).__name__}{holds}); save the weights with "
        "torch.save(model.state_dict(), path)"
    )
