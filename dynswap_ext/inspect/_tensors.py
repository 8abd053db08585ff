"""The tensors in what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["shapes_in", "storages_of", "tensors_in"]

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested sequences, mappings and dataclasses (transformers' ModelOutput is both), in order.

    What holds itself is looked into once.
    """
    inside: set[int] = set()

    def look(item: Any) -> Iterator[torch.Tensor]:
        if isinstance(item, torch.Tensor):
            yield item
            return
        if isinstance(item, Mapping):
            parts = list(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            parts = list(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            parts = [getattr(item, part.name, None) for part in dataclasses.fields(item)]
        else:
            return
        if id(item) in inside:
            return
        inside.add(id(item))
        for part in parts:
            yield from look(part)
        inside.discard(id(item))

    return look(value)


def shapes_in(value: Any) -> tuple[tuple[int, ...], ...]:
    """The shape of each tensor in a value."""
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """What holds a tensor's bytes: one storage, or those of the parts of a wrapper or of a sparse tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from storages_of(getattr(tensor, name))
        return
    if tensor.layout is torch.strided:
        parts = [tensor]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in _COMPRESSED:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return  # oneDNN's own: nobody but the library knows its bytes
    for part in parts:
        with suppress(NotImplementedError, RuntimeError):  # a wrapper that does not say what it wraps
            yield part.untyped_storage()
