"""Opens checkpoint files: tensors that are mapped from the file, by name. Nothing is read but headers."""

from __future__ import annotations

import difflib
import json
import math
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.errors import SourceError

#: Safetensors' own limit on the length of the header.
_HEADER_LIMIT = 100_000_000

_AGAIN = "download or copy it again"

#: Safetensors' names of dtypes, and torch's.
_DTYPES = {
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

#: How files begin that people take for checkpoints, and what to do with them.
_RELATED: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "a GGUF file; load the safetensors file that it was made from"),
    (b"\x89HDF", "an HDF5 file; convert it with safetensors.torch.save_file(tensors, path)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights; fetch them with `git lfs pull`"),
    (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19",
        "a pickle in the format of torch before 1.6; rewrite it once with "
        "torch.save(torch.load(path, weights_only=True), new_path)",
    ),
)


def open_tensors(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint file, each tensor a view of a private mapping of the file.

    Parameters
    ----------
    path
        A safetensors file or a zip file written by ``torch.save``, told apart by content.

    Raises
    ------
    SourceError
        The file is not there, cut short, or of another format. Names the file and the remedy.
    """
    head = _head(path)
    if head[:4] == b"PK\x03\x04":
        return _open_torch_zip(path)
    if len(head) >= 9 and head[8:9] == b"{":
        return _open_safetensors(path)
    for start, meaning in _RELATED:
        if head.startswith(start):
            raise SourceError(f"{path} is {meaning}")
    if not head:
        raise SourceError(f"{path} is empty; {_AGAIN}")
    if len(head) < 9:
        raise SourceError(
            f"{path} is cut short: it has {len(head)} bytes, no checkpoint is so small; {_AGAIN}"
        )
    raise SourceError(
        f"{path} is neither a safetensors file nor a zip file of torch.save (it begins with {head[:8]!r}); "
        "save the weights with safetensors.torch.save_file(model.state_dict(), path)"
    )


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(32)
    except FileNotFoundError as error:
        raise SourceError(f"no such file: {path}{_neighbours(path)}") from error
    except IsADirectoryError as error:
        found = sorted(
            entry.name for suffix in ("*.safetensors", "*.pt", "*.pth") for entry in path.glob(suffix)
        )
        inside = f"; it has {', '.join(found[:5])}" if found else ""
        raise SourceError(f"{path} is a folder; name the checkpoint file itself{inside}") from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; check its permissions") from error


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor is there a folder {path.parent})"
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


# ---- safetensors -------------------------------------------------------------------------------------------


def _open_safetensors(path: Path) -> dict[str, Any]:
    # Not through the safetensors library: its get_tensor() touches each tensor, and with the kernel's
    # read-around that was measured to read all of a 1.5 GB file from the disk at load time.
    header, begin, size = _header(path)
    storage = torch.UntypedStorage.from_file(str(path), False, size)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1].start):
        tensor = torch.empty(0, dtype=entry.dtype)
        if entry.start < entry.end:
            # A slice, so that each tensor has a storage of just its bytes (torch.save writes storages whole).
            tensor.set_(storage[begin + entry.start : begin + entry.end])
        tensors[name] = tensor.reshape(entry.shape)
    return tensors


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the end of the header
    end: int

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> _Entry:
        """Raises ValueError, TypeError or LookupError for what the format does not allow."""
        start, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(length) for length in entry["shape"])
        dtype: torch.dtype = getattr(torch, _DTYPES[entry["dtype"]])
        if start < 0 or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - start:
            raise ValueError("offsets and shape disagree")
        return cls(dtype, shape, start, end)


def _header(path: Path) -> tuple[dict[str, _Entry], int, int]:
    """The entries, where their data begins, and the file's size, which is checked against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _HEADER_LIMIT:
            raise SourceError(
                f"{path} has a safetensors header of {length:,} bytes, the format allows {_HEADER_LIMIT:,}; "
                f"{_AGAIN}"
            )
        if 8 + length > size:
            raise _truncated(path, 8 + length, size, "its header alone")
        try:
            listed: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise SourceError(f"{path} has a damaged safetensors header; {_AGAIN}") from error
    entries = {}
    for name, listing in listed.items():
        if name != "__metadata__":
            try:
                entries[name] = _Entry.parse(listing)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise SourceError(
                    f"{path} lists {name} as {listing!r}, which cannot be mapped here ({error!r}); "
                    f"{_AGAIN}, or save it anew in a dtype that this torch has"
                ) from error
    expected = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if expected > size:
        raise _truncated(path, expected, size, "what its header lists")
    return entries, 8 + length, size


def _truncated(path: Path, expected: int, size: int, what: str) -> SourceError:
    return SourceError(
        f"{path} is cut short: {what} needs {expected:,} bytes, the file has {size:,}; {_AGAIN}"
    )


# ---- zip files of torch.save -------------------------------------------------------------------------------


def _open_torch_zip(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise SourceError(
            f"{path} is cut short: it begins as a zip file and ends, after {size:,} bytes, without the "
            f"directory of one; {_AGAIN}"
        )
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path} holds more than tensors, and is not unpickled because that may run any code: save just "
            f"the weights with torch.save(model.state_dict(), path). Torch says: {_first_line(error)}"
        ) from error
    except RuntimeError as error:
        raise SourceError(
            f"{path} is not a zip file of torch.save, or a damaged one: {_first_line(error)}; "
            f"{_AGAIN}, or save the weights anew"
        ) from error
    return _tensors_of(path, content)


def _tensors_of(path: Path, content: object) -> dict[str, Any]:
    """The state dict in what torch.load returned: the whole, or the one entry that is a state dict."""
    if isinstance(content, dict) and _is_state_dict(content):
        return content  # itself: load_state_dict reads the module versions off its _metadata
    if isinstance(content, dict):
        inner = {str(key): value for key, value in content.items() if value and _is_state_dict(value)}
        if len(inner) == 1:
            return next(iter(inner.values()))
        if inner:
            raise SourceError(
                f"{path} has {len(inner)} state dicts ({', '.join(inner)}), and which is meant is unclear: "
                "save that one alone with torch.save(checkpoint[name], new_path)"
            )
    raise SourceError(
        f"{path} has no state dict (it holds a {type(content).__name__}); "
        "save the weights with torch.save(model.state_dict(), path)"
    )


def _is_state_dict(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and (isinstance(entry, torch.Tensor) or key.endswith("_extra_state"))
        for key, entry in value.items()
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
