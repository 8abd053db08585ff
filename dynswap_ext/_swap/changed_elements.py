"""Finds the elements in which a tensor differs from the master that it was made of.

Only these are written to the master. The others keep their values, which a tensor of another dtype may have
rounded.
"""

from __future__ import annotations

from typing import Final

import torch

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating elements as integers, so that NaN equals NaN, and 0.0 differs from -0.0.

    A complex element becomes two, in a last dimension of its own. Other tensors are returned as they are.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    return tensor.view(_BITS[tensor.element_size()])


def changed_elements(tensor: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return a mask of the elements whose bits differ between two tensors of the same dtype and shape."""
    changed = bits(tensor) != bits(original)
    return changed.any(-1) if tensor.is_complex() else changed


def with_changes(master: torch.Tensor, tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Return the master's values, and those of `tensor` where the mask `changed` is true."""
    new = tensor.to(device=master.device, dtype=master.dtype)
    return torch.where(changed.to(master.device), new, master)
