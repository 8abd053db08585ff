"""Stores what a forward assigns to a buffer as a master, on the device of the master that it replaces.

Note [Assigned in a graph]
A graph of torch.compile assigns buffers at its end, all at once. Until then, code may write in place to the
tensor that it has assigned, or to an alias. So the master that the graph makes of the tensor may be outdated.
Therefore the graph assigns two things: the master to the buffer, and the tensor itself to the module's
`__dict__`, under the buffer's name. As in plain torch, an entry in the `__dict__` hides the buffer: to read
the attribute returns what the forward has assigned, also within the graph. `settle` writes that to the
master, and removes the entry, when masters are asked for or a graph reads the buffer. No guard of a graph
checks the entry.

While a graph is traced, a buffer has been assigned if it is not the one that the module had when the graph
began. The attribute `before_name` returns the latter. The tracer does not look into that attribute, so each
call of the graph reads it again: see Note [Buffers are inputs of a graph].
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
from dynswap_ext._swap.read_by_graphs import before_name, live_name, read_at_each_call
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.untraced import untraced

#: Modules of which a graph has read a buffer. One that assigns a buffer reads it, too (`hasattr`).
#: LOCK: `_looking`, because a set cannot be iterated over while another thread adds to it.
_seen: Final[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
_looking: Final = threading.Lock()


def before(name: str) -> property:
    """Return the property that a swap class has as `before_name(name)`."""

    def read(module: nn.Module) -> torch.Tensor | None:
        with _looking:
            _seen.add(module)
        return module._buffers.get(name)

    return read_at_each_call(read)


def assigned_in_graph(module: Any, before_graph: str, buffer: torch.Tensor | None) -> bool:
    """Return whether the graph that is being traced has assigned the module's present `buffer`.

    `before_graph` is its `before_name`. If so, the assigned tensor is in the module's `__dict__`.
    """
    return buffer is not None and buffer is not getattr(module, before_graph)


def as_buffer(module: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return the tensor to store where `value` is assigned to an attribute of an installed module.

    For a buffer to which a forward assigns what it has computed, that is a master: on the device of the old
    master, and in its dtype unless the forward has changed the dtype. In other cases it is `value` itself.
    """
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
        return cast(torch.Tensor, old)  # the handed-out tensor itself: what is written on it reaches `old`
    if value.dtype == computed:
        return value.to(device=old.device, dtype=old.dtype)
    if session.dtype is not None:
        session.keep_dtype(module, name)  # the old buffer was cast into another dtype
    return value.to(device=old.device)


def _master_of_graph(
    session: Any, module: Any, name: str, value: torch.Tensor, old: torch.Tensor | None
) -> torch.Tensor:
    """Return the master that a graph stores where it assigns `value` to the buffer whose master is `old`.

    A graph cannot ask the session in which dtype it hands out this buffer, so the session's dtype is assumed.
    `settle` corrects the master if that is wrong.
    """
    if old is None:  # the graph itself may have assigned None
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
        held[name] = None  # to remove an entry only if there is one, the graph would need a guard
    else:
        held.pop(name, None)


@untraced
def settle_all() -> None:
    """Write what graphs have assigned to buffers to the masters, in the modules of all installs."""
    with _looking:
        modules = list(_seen)
    for module in modules:
        settle(module)


@untraced
def settle(module: nn.Module) -> None:
    """Write what graphs have assigned to a module's buffers to the masters (Note [Assigned in a graph])."""
    held, session = vars(module), session_of(module)
    names = [name for name in held.get("_buffers") or () if name in held]
    if names and session is not None:
        session.flush_module(module)  # a graph may assign the handed-out tensor, and have written on it
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
