"""Finds the device copy that a tensor is a view of, where only the tensor is known (pure-Python provider)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch

from dynswap_ext._python.device_copy import DeviceCopy, copies
from dynswap_ext._python.held_copies import exclusive, take_to_master
from dynswap_ext._python.storage_owners import storage_address
from dynswap_ext._swap import parameter_proxy


def copy_of(tensor: torch.Tensor) -> DeviceCopy | None:
    """Return the device copy that a tensor is a view of; None if there is none."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    copy = copies.get(storage_address(tensor))
    # The copy may be gone, and another tensor's storage may have its address by now.
    return copy if copy is not None and tensor.dtype == copy.data.dtype else None


def _untracked_alias_made(tensor: torch.Tensor, _: torch.Tensor) -> Callable[[], object] | None:
    """Note that an alias of a handed-out tensor was made, on which writes do not bump the tensor's version.

    Return a function that takes such writes to the master; None if no copy is concerned.
    """
    copy = copy_of(tensor)
    if copy is None:
        return None
    with exclusive:
        copy.untracked_alias_made()
    known = weakref.ref(copy)
    return lambda: _take_if_written(known())


def _take_if_written(copy: DeviceCopy | None) -> bool:
    if copy is not None and not sys.is_finalizing() and copy.written():
        take_to_master(copy)
    return copy is not None


def _again(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    copy = copy_of(tensor)
    weight = None if copy is None else copy.owner()
    if copy is None or weight is None:
        return None
    session = copy.session
    return lambda _: session.hand_out_again(weight)


parameter_proxy.untracked_alias_made.append(_untracked_alias_made)
parameter_proxy.take_to_master.append(lambda tensor: _take_if_written(copy_of(tensor)))
parameter_proxy.handed_out_again.append(_again)
