"""Who else has the bytes of a tensor, as far as torch tells (pure-Python provider)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch


def _not_told(_: int) -> int:
    return 0


#: How many owners a storage has, by its address; 0 where torch does not tell.
_count: Final[Callable[[int], int]] = getattr(torch._C, "_storage_Use_Count", _not_told)


def _owners(tensor: torch.Tensor) -> int:
    return _count(tensor.untyped_storage()._cdata)


def _measure() -> tuple[int, int]:
    """Return what `_owners` counts for a tensor by itself, and for one whose only alias is dying.

    Measured, as torch's own references to a storage are not part of its interface.
    """
    data = torch.zeros(1, device="cpu")
    alias = data.detach()
    at_death: list[int] = []
    watch = weakref.ref(alias, lambda _: at_death.append(_owners(data)))
    del alias, watch
    return _owners(data), at_death[0] if at_death else 0


_ALONE, _AT_DEATH = _measure()


def has_aliases(tensor: torch.Tensor) -> bool:
    """Whether something else has the tensor's bytes: a view, a detached alias, an autograd graph."""
    return _count(tensor.untyped_storage()._cdata) > _ALONE


def has_more_than_a_dying_alias(tensor: torch.Tensor) -> bool:
    """Whether something else has them than an alias that is dying, which still counts as an owner."""
    return _count(tensor.untyped_storage()._cdata) > _AT_DEATH
