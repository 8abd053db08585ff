"""What a forward assigns to a buffer: a master takes the old one's place, on its device and in its dtype.

Note [Assigned in a graph]
A graph of torch.compile assigns buffers when it is over, all at once, and until then code may write in place
to what it has assigned, or to another name of it. So the master that the graph makes may be outdated. The
graph assigns two things: the master, and in the module's `__dict__`, under the buffer's own name, the tensor
that was assigned. As in plain torch, what is in the `__dict__` hides the buffer: whoever reads the attribute
gets what the forward has assigned, in the same graph too. `settle` makes the master equal to it, and takes it
away, when somebody asks for masters, or a graph reads the buffer. No guard of a graph looks there.

In a graph a buffer was assigned if it is not the one that the module had when the graph began, which is an
attribute that the tracer does not look into, and reads anew: see Note [Buffers are inputs of a graph].
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, cast

import torch
from torch import nn

from dynswap_ext._swap.changed_elements import changed_elements, with_changes
from dynswap_ext._swap.kept_in_float32 import dtype_of
from dynswap_ext._swap.lifted_masters import is_lifted, master_of_assigned
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.untraced import untraced

#: Modules whose buffers a graph has looked at.
#: LOCK: `_looking`; a set that grows cannot be gone through.
_seen: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
_looking: Final = threading.Lock()


def before_name(name: str) -> str:
    """Return the attribute that holds the buffer which a module had when the graph began."""
    return f"_dynswap_before_{name}"


def live_name(name: str) -> str:
    """Return the attribute that holds the tensor which was handed out for a buffer."""
    return f"_dynswap_live_{name}"


def before(name: str) -> property:
    return property(_Before(name).__getitem__)


class _Before(dict[nn.Module, torch.Tensor]):
    """Always empty: `dict.__getitem__`, which is in C, comes to `__missing__`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @untraced
    def __missing__(self, module: nn.Module) -> torch.Tensor | None:
        with _looking:
            _seen.add(module)
        return module._buffers.get(self._name)


def assigned_in_graph(module: Any, before_graph: str, buffer: torch.Tensor | None) -> bool:
    """Whether the graph that is being traced has assigned a buffer: its `__dict__` has what."""
    return buffer is not None and buffer is not getattr(module, before_graph)


def as_buffer(module: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """What takes a buffer's place where a forward assigns what it computed: a master as the old one was."""
    session = session_of(module)
    held = module.__dict__
    buffers = held.get("_buffers", {})
    if session is None or name not in buffers or isinstance(value, nn.Parameter):
        return value
    old = buffers[name]
    if torch.compiler.is_dynamo_compiling():
        held[name] = value
        return _master_of_graph(session, module, name, value, old)
    if old is None:
        return value
    if name in held:
        settle(module)
        old = held["_buffers"][name]
    if value.device != session.device or not session.inside_call():
        return value
    computed = dtype_of(session, module, name, old)
    if is_lifted(old):
        return master_of_assigned(value, old)
    if value.dtype == computed and value.shape == old.shape and value is getattr(module, name):
        return cast(torch.Tensor, old)  # what was handed out, written in place: the master gets that
    if value.dtype == computed:
        return value.to(device=old.device, dtype=old.dtype)
    if session.dtype is not None:
        session.keep_dtype(module, name)  # the old buffer was cast into another one
    return value.to(device=old.device)


def _master_of_graph(
    session: Any, module: Any, name: str, value: torch.Tensor, old: torch.Tensor | None
) -> torch.Tensor:
    """Return the master for a buffer that a graph assigns, as the old one was.

    A graph cannot ask the session about one weight: `settle` corrects the dtype.
    """
    if old is None:  # the graph may have assigned that itself
        old = getattr(module, before_name(name))
    if old is None or value.device != session.device:
        return value
    computed = session.dtype if session.dtype is not None and old.is_floating_point() else old.dtype
    if value.dtype != computed:
        return value.to(device=old.device)
    if value.shape == old.shape and value is getattr(module, live_name(name)):
        return cast(torch.Tensor, getattr(module, before_name(name)))  # put back, or written in place
    return value.to(device=old.device, dtype=old.dtype)


def forget_assigned(module: Any, name: str) -> None:
    """Forget what a graph has assigned to a buffer, as the buffer becomes None or leaves its module."""
    held = module.__dict__
    if "_buffers" not in held or name not in held["_buffers"]:
        return
    if torch.compiler.is_dynamo_compiling():
        held[name] = None  # whether there is something, a guard would have to tell
    else:
        held.pop(name, None)


@untraced
def settle_all() -> None:
    """Settle the modules of every install."""
    with _looking:
        modules = list(_seen)
    for module in modules:
        settle(module)


@untraced
def settle(module: nn.Module) -> None:
    """Bring what a graph has assigned to a module's buffers to the masters."""
    held, session = vars(module), session_of(module)
    names = [name for name in held.get("_buffers") or () if name in held]
    if names and session is not None:
        session.flush_module(module)  # what was handed out may have been written, and assigned again
    for name in names:
        assigned, master = held.pop(name), module._buffers[name]
        if session is None or assigned is None or master is None or assigned is master:
            continue
        if assigned.device != session.device:
            module._buffers[name] = assigned
        elif assigned.dtype == dtype_of(session, module, name, master):
            _write(assigned, master)
        else:
            module._buffers[name] = assigned.to(device=master.device)
            session.keep_dtype(module, name)


def _write(assigned: torch.Tensor, master: torch.Tensor) -> None:
    with torch.inference_mode(master.is_inference()), torch.no_grad():
        assigned, master = assigned.detach(), master.detach()
        changed = changed_elements(assigned, master.to(assigned.device, assigned.dtype))
        if bool(changed.any()):
            master.copy_(with_changes(master, assigned, changed))
