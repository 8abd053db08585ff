"""How many owners a tensor's storage has."""

from __future__ import annotations

import weakref

import torch

__all__ = ["OWNERS_ALONE", "OWNERS_AT_DEATH", "owners"]


def owners(tensor: torch.Tensor) -> int:
    """How many owners the tensor's storage has; 0 where torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


def _measure_owners() -> tuple[int, int]:
    """What `owners` says of a tensor by itself, and of one whose only alias is dying.

    Measured, as torch's own references to a storage are not part of its interface.
    """
    data = torch.zeros(1, device="cpu")
    alias = data.detach()
    at_death: list[int] = []
    watch = weakref.ref(alias, lambda _: at_death.append(owners(data)))
    del alias, watch
    return owners(data), at_death[0] if at_death else 0


OWNERS_ALONE, OWNERS_AT_DEATH = _measure_owners()
