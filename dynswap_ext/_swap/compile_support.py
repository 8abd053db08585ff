"""What torch.compile sees of an installed model: a weight is fetched by an operator of the graph.

The native provider's descriptor is a property whose getter nobody calls but torch.compile's tracer. The
graph takes the masters as its inputs, as that of a plain model takes its parameters, and
`dynswap_ext::fetch` streams them where they are used.

Note [Buffers are inputs of a graph]
A forward may write a buffer, in training (statistics) or not (a cache), and the master has to get that. What
an operator of the graph returns is the graph's own, and writes on it are gone with it. So the graph takes the
handed-out tensor itself as an input: the tracer is given an attribute that it does not look into, a property
whose getter is a function in C, and reads that anew at each call. It then compares what it has read by its
address, for which all of them have to be there at once: they are kept until the graph runs, or somebody asks
what was written. Compiled code bumps the version of an input that it writes, as operations do.
Large integers in eval mode are packed weights, which nobody writes: they are fetched as parameters are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import nn

from dynswap_ext._swap.assigned_buffers import (
    assigned_in_graph,
    before_name,
    live_name,
    settle,
    settle_all,
)
from dynswap_ext._swap.state import STATE_KEY, session_of
from dynswap_ext._util.untraced import untraced

#: Buffers of integers with more bytes are weights of a quantised model.
_PACKED_BYTES: Final = 1 << 20

#: What a forward gets for a master, or None if no install of this process serves it: the native provider's,
#: once the extension is there. The graphs of the pure-Python provider convert masters themselves.
fetch_master: Callable[[torch.Tensor], torch.Tensor | None] | None = None


class _Kept(threading.local):
    def __init__(self) -> None:
        self.inputs: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]]
        self.inputs = weakref.WeakKeyDictionary()


_kept = _Kept()


def release_inputs() -> None:
    if _kept.inputs:
        _kept.inputs.clear()


def flush_graphs() -> None:
    """Bring what graphs have assigned and written to the masters."""
    settle_all()
    release_inputs()


def live(name: str) -> property:
    return property(_Live(name).__getitem__)


class _Live(dict[nn.Module, torch.Tensor]):
    """Always empty: `dict.__getitem__`, which is in C, comes to `__missing__`."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @untraced
    def __missing__(self, module: nn.Module) -> torch.Tensor:
        session = session_of(module)
        if session is None:  # a copy of an installed module's class, or the module was uninstalled since
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{self._name}'")
        settle(module)
        tensor: torch.Tensor = session.fetch_buffer(module, self._name)
        _kept.inputs.setdefault(module, {})[self._name] = tensor
        return tensor


def is_packed(buffer: torch.Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex()) and buffer.nbytes > _PACKED_BYTES


#: On which device, and in which dtype, a module is served its master of this name. None: as it is.
PlaceOf = Callable[[nn.Module, str, torch.Tensor], tuple[torch.device, torch.dtype] | None]


def _place_in_session(
    module: nn.Module, _: str, master: torch.Tensor
) -> tuple[torch.device, torch.dtype] | None:
    """Return where a native session serves a master: the state tells, as a graph cannot ask a session."""
    held = module.__dict__
    if STATE_KEY not in held:
        return None
    state = held[STATE_KEY]
    dtype = state.dtype if state.dtype is not None and master.is_floating_point() else master.dtype
    return None if master.device == state.device and master.dtype == dtype else (state.device, dtype)


def getter(name: str, place_of: PlaceOf = _place_in_session) -> Callable[[Any], Any]:
    """The function to trace in place of an access to `name`."""
    live_attribute, before_graph = live_name(name), before_name(name)

    def fetch_traced(module: Any) -> Any:
        held = module.__dict__
        is_param = name in held["_parameters"]
        if is_param:
            master = held["_parameters"][name]
        elif name in held["_buffers"]:
            master = held["_buffers"][name]
            if assigned_in_graph(module, before_graph, master):
                return held[name]
        else:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
        place = None if master is None else place_of(module, name, master)
        if place is None:
            return master
        if not is_param and (module.training or not is_packed(master)):
            return getattr(module, live_attribute)
        return fetch(master, *place)

    return fetch_traced


def fetch(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """What a graph gets for a weight that is not written."""
    if not master.requires_grad or torch.is_grad_enabled():
        return cast(torch.Tensor, _fetch(master, device, dtype))
    with torch.enable_grad():  # a parameter requires gradients under no_grad(), too
        return cast(torch.Tensor, _fetch(master, device, dtype))


def _copied(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy, dense in the order of the strides, as what is handed out for a master is."""
    return tensor.to(device=device, dtype=dtype, copy=True)


# Invariant: it returns what `_copied` returns, for whose strides on a fake master the graph is made. With
# mode="reduce-overhead" it runs between CUDA graphs: a replay would read what was streamed in the first call.
@torch.library.custom_op("dynswap_ext::fetch", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _fetch(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The master on the device, through the install that serves it; a copy, which the graph may overwrite."""
    release_inputs()
    with torch.no_grad():
        handed_out = None if fetch_master is None else fetch_master(master)
        # None if the model was uninstalled since, or if this is no master but a view of one.
        return _copied(master if handed_out is None else handed_out, device, dtype)


@_fetch.register_fake
def _traced(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    copy = _copied(master, device, dtype)
    if isinstance(master, nn.Parameter):
        copy._is_param = True  # code that is traced asks `isinstance(self.weight, nn.Parameter)`
    return copy


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.device, ctx.dtype = inputs[0].device, inputs[0].dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient.to(device=ctx.device, dtype=ctx.dtype), None, None


_fetch.register_autograd(_backward, setup_context=_remember)
