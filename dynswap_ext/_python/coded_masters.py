"""Masters that are coded until they are written to, `LosslessTensor` (pure-Python provider).

They are handed out as plain tensors of their values. Other masters are not asked about here, since each read
of a weight would pay for that. Coded bytes are never written to, so a copy of a coded
master takes no memory (`DeviceCopy.before`). The values are compared with it once the master is plain.
"""

from __future__ import annotations

import torch

from dynswap_ext.lossless.tensor import LosslessTensor


def is_range(master: LosslessTensor) -> bool:
    """Return whether a master's values are a range of what coded bytes stand for. Other views stay."""
    same = master.dtype == master._dynswap_content.dtype
    return master.coded is not None and master.is_contiguous() and same


def memory_of(master: LosslessTensor) -> torch.Tensor:
    """Return the plain tensor that has a master's bytes: its values, or all coded bytes."""
    coded = master.coded  # read once: it is dropped when the master becomes plain
    return master.decoded() if coded is None else coded


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain tensor. It is new if they are coded, and shows the same bytes if not."""
    return tensor.decoded() if isinstance(tensor, LosslessTensor) else tensor


def place_of(master: LosslessTensor) -> tuple[int, int]:
    """Return a number for the memory of a master's values, and at which byte of it the master begins.

    The number is of the master and its aliases, coded or plain.
    """
    return id(master._dynswap_content), int(master.storage_offset()) * master.element_size()
