"""Tells whether a tensor's storage has other owners than the tensor (pure-Python provider)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch

#: Returns how many owners a storage has, given `storage_address`.
_count: Final[Callable[[int], int]] = torch._C._storage_Use_Count


def _measure() -> tuple[int, int]:
    """Return how many owners torch counts for one tensor's storage: alone, and while its only alias is freed.

    This is measured, because torch does not document how many references it holds itself.
    """
    data = torch.zeros(1, device="cpu")
    address = data.untyped_storage()._cdata
    alias = data.detach()
    at_death: list[int] = []
    watch = weakref.ref(alias, lambda _: at_death.append(_count(address)))
    del alias, watch
    return _count(address), at_death[0]


_ALONE, _AT_DEATH = _measure()


def has_aliases(address: int) -> bool:
    """Return whether a storage has another owner than one tensor: a view, a detached alias, a graph."""
    return _count(address) > _ALONE


def has_more_than_a_dying_alias(address: int) -> bool:
    """Return whether a storage has more owners than one tensor and one alias that is being freed."""
    return _count(address) > _AT_DEATH


def storage_address(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage as long as it is alive; 0 if it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
