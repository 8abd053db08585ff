"""Masters that are coded until they are written to, `LosslessTensor` (pure-Python provider).

They are handed out as plain tensors of their values. Coded bytes are never written to, so a copy of a coded
master takes no memory (`DeviceCopy.before`). The values are compared with it once the master is plain.
"""

from __future__ import annotations

import torch

from dynswap_ext.lossless.tensor import LosslessTensor


def is_coded(master: torch.Tensor) -> bool:
    return isinstance(master, LosslessTensor) and master.coded is not None


def is_range(master: torch.Tensor) -> bool:
    """Return whether a master's values are a range of what coded bytes stand for. Other views stay."""
    if not isinstance(master, LosslessTensor) or master.coded is None:
        return False
    return master.is_contiguous() and master.dtype == master._dynswap_content.dtype


def memory_of(master: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that has a master's bytes: the master itself, or all coded bytes."""
    if not isinstance(master, LosslessTensor):
        return master
    coded = master.coded  # read once: it is dropped when the master becomes plain
    return master.decoded() if coded is None else coded


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as a plain tensor. It is new if they are coded, and shows the same bytes if not."""
    return tensor.decoded() if isinstance(tensor, LosslessTensor) else tensor


def place_of(master: torch.Tensor) -> tuple[int, int]:
    """Return a number for the memory of a master's values, and at which byte of it the master begins.

    RuntimeError if it has no memory. The number is of the master and its aliases, coded or plain.
    """
    if isinstance(master, LosslessTensor):
        return id(master._dynswap_content), int(master.storage_offset()) * master.element_size()
    return master.untyped_storage()._cdata, master.data_ptr()
