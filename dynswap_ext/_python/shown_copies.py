"""The copy whose bytes a tensor shows, for whoever has the tensor alone (pure-Python provider)."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable

import torch

from dynswap_ext._python.device_copy import DeviceCopy, copies
from dynswap_ext._python.storage_owners import storage_address
from dynswap_ext._swap.parameter_proxy import handed_out_again, take_to_master, untracked_alias_made


def copy_of(tensor: torch.Tensor) -> DeviceCopy | None:
    """The copy whose bytes a tensor, or a view, shows."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    copy = copies.get(storage_address(tensor))
    # A copy may be gone, and its storage's address another's.
    return copy if copy is not None and tensor.dtype == copy.data.dtype else None


def _untracked_alias_made(tensor: torch.Tensor, _: torch.Tensor) -> Callable[[], None] | None:
    """Let the bytes tell whether it was written: its version will not."""
    copy = copy_of(tensor)
    if copy is None:
        return None
    copy.untracked_alias_made()
    return functools.partial(_take_if_written, weakref.ref(copy))


untracked_alias_made.append(_untracked_alias_made)


def _take_if_written(known: weakref.ref[DeviceCopy]) -> None:
    copy = known()
    session = None if copy is None else copy.session()
    if copy is not None and session is not None and not sys.is_finalizing() and copy.written():
        session.take_to_master(copy)


def _take_to_master(tensor: torch.Tensor) -> bool:
    copy = copy_of(tensor)
    if copy is not None:
        _take_if_written(weakref.ref(copy))
    return copy is not None


take_to_master.append(_take_to_master)


def _again(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    copy = copy_of(tensor)
    session, weight = (None, None) if copy is None else (copy.session(), copy.owner())
    return None if session is None or weight is None else lambda _: session.hand_out_again(weight)


handed_out_again.append(_again)
