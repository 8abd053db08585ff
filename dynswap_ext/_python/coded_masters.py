"""Where the values of coded masters (`LosslessTensor`) are: the pure-Python provider.

A read of a weight tests the class before it calls these, since other masters would pay for the call. Coded
bytes are never written to, so a clone of a whole coded master takes no memory (`DeviceCopy.before`).
"""

from __future__ import annotations

import torch

from dynswap_ext.lossless.tensor import LosslessTensor


def memory_of(master: LosslessTensor) -> torch.Tensor:
    """Return the plain tensor that has a master's bytes: its values, or the coded bytes of its content."""
    coded = master.coded  # read once: it is dropped when the master becomes plain
    return master.decoded() if coded is None else coded


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain tensor: a new one if they are coded, and else in the same memory."""
    return tensor.decoded() if isinstance(tensor, LosslessTensor) else tensor


def place_of(master: LosslessTensor) -> tuple[int, int]:
    """Return a number for the memory of a master's values, and at which byte of it the master begins.

    The master and its aliases have the same number, coded or plain.
    """
    return id(master._dynswap_content), int(master.storage_offset()) * master.element_size()
