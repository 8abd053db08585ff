"""A tensor's storage, and whether others have it, as far as torch tells (pure-Python provider)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch

#: How many owners a storage has, by its address; 0 where torch does not tell.
_count: Final[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def _measure() -> tuple[int, int]:
    """Return what is counted for a tensor by itself, and for one whose only alias is dying.

    Measured, as torch's own references to a storage are not part of its interface.
    """
    data = torch.zeros(1, device="cpu")
    address = data.untyped_storage()._cdata
    alias = data.detach()
    at_death: list[int] = []
    watch = weakref.ref(alias, lambda _: at_death.append(_count(address)))
    del alias, watch
    return _count(address), at_death[0] if at_death else 0


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
