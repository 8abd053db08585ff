"""The call of an installed module, for the pure-Python provider (native: csrc/python/call.cpp)."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from dynswap_ext._python import saved_hooks
from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.held_copies import drop, exclusive
from dynswap_ext._swap.compile_support import release_inputs
from dynswap_ext._swap.state import session_of


class _Thread(threading.local):
    depth = 0

    def __init__(self) -> None:
        #: Weights whose copies stay until the running module's call ends or the call of another begins.
        self.kept: list[Weight] = []


_thread = _Thread()


def inside_call() -> bool:
    """Return whether this thread is inside the call of an installed module."""
    return _thread.depth > 0


def keep(weight: Weight, copy: DeviceCopy) -> None:
    """Keep a weight's copy for the running module, which may read the weight again, as attention does."""
    if copy.kept:
        copy.asked_again = True
    else:
        copy.kept = True
        _thread.kept.append(weight)


def _end_of_call() -> None:
    with exclusive:
        while _thread.kept:
            copy = _thread.kept.pop().copy
            if copy is not None:
                copy.let_go()
                drop(copy)


def namespace_for(cls: type) -> dict[str, Any]:
    """Return the `__call__` of a swap class, which tells the session where calls begin and end."""

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call: Any = cls.__call__  # looked up each time, as it may have been patched
        if torch.compiler.is_dynamo_compiling():
            return call(self, *args, **kwargs)
        session = session_of(self)
        if session is not None and _thread.depth == 0:
            session.call_begins(self)
        if _thread.kept:
            _end_of_call()
        release_inputs()
        depth, hooked = _thread.depth, False
        try:  # from here on, so that the depth is restored wherever an interrupt comes
            _thread.depth = depth + 1
            if session is not None and saved_hooks.wanted():
                saved_hooks.push()
                hooked = True
            return call(self, *args, **kwargs)
        except Exception as error:
            if session is not None and depth == 0:
                session.hooks.call_failed(session, error)
            raise
        finally:
            _thread.depth = depth
            if hooked:
                saved_hooks.pop()
            if _thread.kept:
                _end_of_call()
            if session is not None and depth == 0:
                session.call_ends()

    return {"__call__": __call__}
