"""Zip files of ``torch.save``, mapped by ``torch.load(mmap=True)``."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from dynswap_ext.checkpoint.formats.common import AGAIN
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.errors import SourceError


def matches(head: bytes) -> bool:
    """Whether a file that begins so is meant to be of this format."""
    return head[:4] == b"PK\x03\x04"


class TorchZip(Checkpoint):
    """One file of ``torch.save``: a state dict, or a dict that holds just one."""

    format = "torch"

    def __init__(self, path: Path, *, weights_only: bool = True) -> None:
        self._state = _state_dict(path, weights_only)
        tensors = {name: value for name, value in self._state.items() if isinstance(value, torch.Tensor)}
        objects = {name: value for name, value in self._state.items() if name not in tensors}
        super().__init__(
            path,
            _entries(tensors, path),
            files=(path,),
            objects=objects,
            versions=getattr(self._state, "_metadata", None),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        tensor: torch.Tensor = self._state[name]
        return tensor


def _entries(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, Entry]:
    # Torch does not say where in the file a storage lies, but where it is in memory tells them apart.
    return {
        name: Entry(tensor.dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size(), path, None)
        for name, tensor in tensors.items()
    }


def _state_dict(path: Path, weights_only: bool) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise SourceError(
            f"{path} is cut short: it begins as a zip file and ends, after {size:,} bytes, without the "
            f"directory of one; {AGAIN}"
        )
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise SourceError(
            f"{path} holds more than tensors, and is not unpickled because that may run any code: save just "
            f"the weights with torch.save(model.state_dict(), path). Torch says: {_first_line(error)}"
        ) from error
    except RuntimeError as error:
        raise SourceError(
            f"{path} is not a zip file of torch.save, or a damaged one: {_first_line(error)}; "
            f"{AGAIN}, or save the weights anew"
        ) from error
    return _find_state_dict(path, content)


def _find_state_dict(path: Path, content: object) -> dict[str, Any]:
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
