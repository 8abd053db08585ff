"""Hides the operations that an install runs by itself from active `TorchDispatchMode`s."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class SeesInstalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class of modes that see an install's own operations, too, because they only measure."""


@contextlib.contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Disable the active modes, except `SeesInstalls`, for operations that an install runs by itself.

    Selective checkpointing would refuse operations in backward that it has not seen in forward. And a write
    has to reach the master even if it ends while a mode traces, or computes with fake tensors.
    """
    traced = _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    if not traced and not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes() as modes, contextlib.ExitStack() as seeing:
        for mode in reversed(modes):  # the innermost is the first of them
            if isinstance(mode, SeesInstalls):
                seeing.enter_context(mode)
        yield
