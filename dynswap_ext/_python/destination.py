"""Where a session wants its tensors, and what becomes of a master on its way there (pure-Python provider)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where tensors are wanted, and in which dtype."""

    device: torch.device
    dtype: torch.dtype | None
    #: Whether masters that have a wider dtype keep it (Note [What dtype= casts]).
    never_narrows: bool = False

    def dtype_for(self, master: torch.Tensor) -> torch.dtype:
        """Only floating masters are cast."""
        if self.dtype is None or not master.is_floating_point():
            return master.dtype
        keeps = self.never_narrows and master.dtype.itemsize > self.dtype.itemsize
        return master.dtype if keeps else self.dtype

    def holds(self, master: torch.Tensor) -> bool:
        """Whether a master is handed out itself: it is what and where it should be, or has no data now."""
        if (
            isinstance(master, UninitializedTensorMixin)
            or master.is_meta
            or (master.numel() > 0 and _is_emptied(master))
            or (master.numel() == 0 and not isinstance(master, nn.Parameter))
        ):
            return True
        return master.device == self.device and master.dtype == self.dtype_for(master)

    def bytes_for(self, master: torch.Tensor) -> int:
        return master.numel() * self.dtype_for(master).itemsize

    def convert(self, master: torch.Tensor) -> torch.Tensor:
        """Torch's own conversion, which is what a copy has to equal to the bit. Differentiable."""
        return master.to(device=self.device, dtype=self.dtype_for(master))


def lies_as_copy(master: torch.Tensor) -> bool:
    """Return whether a copy has a master's bytes in the master's order: no gaps, nothing that torch negates.

    Others are copied at each access and have no place in a plan (native: csrc/tensor/master.h).
    """
    if master.is_conj() or master.is_neg():
        return False
    # The first is quick, and true of nearly all.
    return master.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense.default(master))


def _is_emptied(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage was resized to nothing, as FSDP does between its calls."""
    if torch.compiler.is_compiling():
        return False  # what is traced has data
    try:
        size = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return False
    return type(size) is int and size == 0  # one that is symbolic is being traced
