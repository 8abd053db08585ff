"""Lets transformers read files with coded entries, which it opens with the safetensors library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext.checkpoint.formats.safetensors_file import CODED, DTYPES, read_safetensors

#: The module of transformers that opens checkpoints. It calls the library by the name `safe_open`.
_LOADER: Final = "transformers.modeling_utils"


@contextmanager
def coded_files() -> Iterator[None]:
    """Make a context in which transformers reads coded entries as the tensors that they stand for."""
    loader: Any = sys.modules.get(_LOADER)
    if loader is None:
        yield
        return
    library = loader.safe_open

    def opened(filename: str | PathLike[str], *arguments: Any, **options: Any) -> Any:
        file = library(filename, *arguments, **options)
        return _File(file, Path(filename)) if CODED in (file.metadata() or {}) else file

    loader.safe_open = opened
    try:
        yield
    finally:
        loader.safe_open = library


class _File:
    """An open file of the safetensors library, in which coded entries are `LosslessTensor`."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self.get_tensor = file, read_safetensors(path).tensor

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> _Slice:
        """Return what parts of an entry are read from by indexing."""
        return _Slice(self.get_tensor(name))


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.get_shape = lambda: list(tensor.shape)
        self.get_dtype = lambda: next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]
