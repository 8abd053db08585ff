"""What `TorchDispatchMode`s see of the operations that an install runs by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class SeesInstalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees what installs do, too: it measures, and changes nothing."""


@contextlib.contextmanager
def unseen_by_modes() -> Iterator[None]:
    """Keep the caller's modes, but for `SeesInstalls`, from what happens here: none of it is theirs.

    Selective checkpointing refuses those in backward that it has not seen in forward, and a write that ends
    while somebody traces, or computes with fake tensors, has to reach the master.
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
