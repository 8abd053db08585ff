"""The device and dtype in which masters are handed out, and the conversion to them (pure-Python provider)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from dynswap_ext.lossless.tensor import LosslessTensor


@dataclass(frozen=True, slots=True)
class Destination:
    """The device and the dtype in which masters are handed out."""

    device: torch.device
    #: The dtype of floating masters; None: that of each master.
    dtype: torch.dtype | None
    #: Whether masters with a wider dtype keep it (Note [What dtype= casts]).
    never_narrows: bool = False

    def dtype_for(self, master: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a master is handed out. Only floating masters are cast."""
        if self.dtype is None or not master.is_floating_point():
            return master.dtype
        keeps = self.never_narrows and master.dtype.itemsize > self.dtype.itemsize
        return master.dtype if keeps else self.dtype

    def holds(self, master: torch.Tensor) -> bool:
        """Return whether a master is handed out itself.

        That is so if it has the wanted device and dtype already, and is not coded, or if it has no data now.
        """
        if (
            isinstance(master, UninitializedTensorMixin)
            or master.is_meta
            or (master.numel() > 0 and _is_emptied(master))
            or (master.numel() == 0 and not isinstance(master, nn.Parameter))
        ):
            return True
        there = master.device == self.device and master.dtype == self.dtype_for(master)
        return there and not (
            type(master) is LosslessTensor and master.coded is not None and master.is_range()
        )

    def bytes_for(self, master: torch.Tensor) -> int:
        return master.numel() * self.dtype_for(master).itemsize

    def convert(self, master: torch.Tensor) -> torch.Tensor:
        """Return a master as torch converts it, differentiably. A copy has to equal that to the bit."""
        return master.to(device=self.device, dtype=self.dtype_for(master))


def lies_as_copy(master: torch.Tensor) -> bool:
    """Return whether a copy has the bytes of a master in the same order.

    A master with gaps, or with a pending conjugation or negation, has no place in a plan, so its copy does
    not stay on the device (native: csrc/tensor/master.h).
    """
    if master.is_conj() or master.is_neg():
        return False
    # The first check is quick, and true of nearly all masters.
    return master.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(master))


def _is_emptied(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage was resized to 0 bytes, as FSDP does between calls."""
    if torch.compiler.is_compiling():
        return False  # a tensor that is traced has data
    try:
        size = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False
    return type(size) is int and size == 0  # a symbolic size belongs to a tensor that is traced
