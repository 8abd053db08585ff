"""Finds the bytes of a master and counts them, whatever kind of tensor it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynswap_ext._util.file_mappings import FileMappings, Mapping

_COMPRESSED_ROWS: Final = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS: Final = ("ccol_indices", "row_indices", "values")
#: Methods that return the parts of a sparse tensor, by its layout. oneDNN's layout has no such methods.
_SPARSE_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that make up a tensor: itself, or the parts of a wrapper or sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout is not torch.strided:
        parts = [getattr(tensor, method)() for method in _SPARSE_PARTS.get(tensor.layout, ())]
    else:
        yield tensor
        return
    for part in parts:
        yield from parts_of(part)


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor's parts."""
    for part in parts_of(tensor):
        with suppress(NotImplementedError, RuntimeError):  # a wrapper that does not say what it wraps
            yield part.untyped_storage()


def address_of(part: torch.Tensor) -> int:
    """Return where the storage of a strided tensor begins; 0 if it has none, or its class shows none."""
    try:
        return part.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's elements take as stored. For a view, only its own elements count."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def mapping_of(master: torch.Tensor, mappings: FileMappings) -> Mapping | None:
    """Return the first file mapping that has bytes of a master (of its first part, if it is a wrapper).

    None if the master is not in a mapped file.
    """
    part = next(parts_of(master), None)
    if part is None or not part.is_cpu:
        return None
    try:
        return next(iter(mappings.overlapping(part.data_ptr(), max(part.nbytes, 1))), None)
    except (NotImplementedError, RuntimeError):  # a class that shows no address
        return None
