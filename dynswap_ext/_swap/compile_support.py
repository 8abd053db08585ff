"""What torch.compile sees of an installed model: an operator of the graph fetches each weight.

The descriptor of a provider is a property whose getter only the tracer of torch.compile runs. The inputs of
the graph are masters, as those of a plain model's graph are its parameters, and the operator
`dynswap_ext::fetch` brings each of them to the device where it is used.

Note [Buffers are inputs of a graph]
A forward may write a buffer, in training (statistics) or not (a cache), and the write has to reach the
master. What an operator of the graph returns belongs to the graph, and writes on it would be lost. So the
graph takes the handed-out tensor of a buffer itself as an input. To that end the tracer is given an attribute
that it does not look into, a property whose getter is a function in C. Each call of the graph reads it again,
and guards then compare the addresses of the tensors that were read. So all of these have to be alive at the
same time: they are kept until the graph runs, or until masters are asked for. Compiled code bumps the version
of an input that it writes, as operations do, so the write is noticed.
Large integer buffers of a module in eval mode are packed weights, which are not written: they are fetched as
parameters are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final, cast

import torch
from torch import nn

from dynswap_ext._swap.assigned_buffers import assigned_in_graph, settle, settle_all
from dynswap_ext._swap.read_by_graphs import before_name, dtype_name, live_name, read_at_each_call
from dynswap_ext._swap.state import STATE_KEY, session_of
from dynswap_ext._util.warn import warn
from dynswap_ext.lossless.tensor import LosslessTensor

#: A buffer of integers with more bytes than this is a packed weight of a quantised model.
_PACKED_BYTES: Final = 1 << 20

#: Returns what a forward gets for a master, or None if no native session serves it. It is set when the native
#: extension is loaded. The operator `dynswap_ext::fetch` copies a master of a pure-Python session itself.
fetch_master: Callable[[torch.Tensor], torch.Tensor | None] | None = None


class _Kept(threading.local):
    def __init__(self) -> None:
        self.inputs: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]]
        self.inputs = weakref.WeakKeyDictionary()


_kept = _Kept()


def release_inputs() -> None:
    """Drop the handed-out buffers that are kept on this thread as inputs of a graph.

    See Note [Buffers are inputs of a graph].
    """
    if _kept.inputs:
        _kept.inputs.clear()


def flush_graphs() -> None:
    """Write what graphs have assigned to buffers to the masters, and drop their inputs that are kept."""
    settle_all()
    release_inputs()


def live(name: str) -> property:
    """Return the property that a swap class has as `live_name(name)`."""

    def read(module: nn.Module) -> torch.Tensor:
        session = session_of(module)
        if session is None:  # a copy of an installed module's class, or the module was uninstalled since
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
        settle(module)
        tensor: torch.Tensor = session.fetch_buffer(module, name)
        _kept.inputs.setdefault(module, {})[name] = tensor
        return tensor

    return read_at_each_call(read)


def dtype_handed_out(name: str) -> property:
    """Return the property that a swap class has as `dtype_name(name)`."""

    def read(module: nn.Module) -> torch.dtype | None:
        session = session_of(module)
        return None if session is None else session.dtype_of(module, name)

    return read_at_each_call(read)


def is_packed(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a packed weight of a quantised model, as its dtype and size suggest."""
    return not (buffer.is_floating_point() or buffer.is_complex()) and buffer.nbytes > _PACKED_BYTES


#: Returns the device and dtype in which a module is handed out its master of a name; None: the master itself.
PlaceOf = Callable[[nn.Module, str, torch.Tensor], tuple[torch.device, torch.dtype] | None]


def _place_in_session(
    module: nn.Module, name: str, master: torch.Tensor
) -> tuple[torch.device, torch.dtype] | None:
    """Return the device and dtype in which a native session hands out a master; None: the master itself.

    Code that is traced cannot call the session. So the device is read from the module's state, and the dtype
    of a parameter from its `dtype_name`. That of a buffer is only compared, as the graph gets it handed out.
    """
    held = module.__dict__
    if STATE_KEY not in held:
        return None
    state, dtype = held[STATE_KEY], master.dtype
    if state.dtype is not None and master.is_floating_point():
        dtype = getattr(module, dtype_name(name)) if name in held["_parameters"] else state.dtype
    return None if master.device == state.device and master.dtype == dtype else (state.device, dtype)


def getter(name: str, place_of: PlaceOf = _place_in_session) -> Callable[[Any], Any]:
    """Return the function that torch.compile traces in place of an access to `name`."""
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
    """Return what a graph gets for a weight that it does not write."""
    if not master.requires_grad or torch.is_grad_enabled():
        return cast(torch.Tensor, _fetch(master, device, dtype))
    with torch.enable_grad():  # a parameter requires gradients under no_grad(), too
        return cast(torch.Tensor, _fetch(master, device, dtype))


def _copied(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a dense copy whose dimensions are in the memory order of `tensor`, as handed-out tensors are."""
    return tensor.to(device=device, dtype=dtype, copy=True)


#: What copies a master for a graph if no session hands it out. The native provider has a function that keeps
#: its memory page-locked meanwhile.
copied: Callable[[torch.Tensor, torch.device, torch.dtype], torch.Tensor] = _copied


# Invariant: the result has the strides of `_copied`, because the graph is compiled for the strides that
# `_traced` gets from it. The tag keeps the operator out of CUDA graphs (mode="reduce-overhead"): a replay
# would read what the first call has streamed.
@torch.library.custom_op("dynswap_ext::fetch", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _fetch(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of what the install hands out for a master, which the graph may overwrite."""
    release_inputs()
    with torch.no_grad():
        handed_out = None if fetch_master is None else fetch_master(master)
        # It is None if no native session serves the master any more, or if this is a view of a master.
        return copied(master if handed_out is None else handed_out, device, dtype)


@_fetch.register_fake
def _traced(master: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    copy = _copied(master, device, dtype)
    if isinstance(master, nn.Parameter):
        copy._is_param = True  # code that is traced asks `isinstance(self.weight, nn.Parameter)`
    return copy


@_fetch.register_torch_dispatch(LosslessTensor)
def _fetch_decoded(_: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
    """Return a decoded master's copy, as a graph has the coded bytes and cannot tell whose they are."""
    master, *place = args
    if master.coded is not None:
        _say_decoded()
    copy: torch.Tensor = func(master.decoded(), *place)
    if isinstance(master, nn.Parameter):
        copy._is_param = True
    return copy


@cache
def _say_decoded() -> None:
    warn(
        "a compiled graph decodes coded masters on the CPU in each call and copies them whole: nothing is "
        "fetched ahead. Load the checkpoint without the lossless code, or run the model uncompiled"
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.device, ctx.dtype = inputs[0].device, inputs[0].dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient.to(device=ctx.device, dtype=ctx.dtype), None, None


_fetch.register_autograd(_backward, setup_context=_remember)
