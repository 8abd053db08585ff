"""Masters of a tensor class of their own, as quantised weights are (native provider).

Note [Subclasses are taken apart]
---------------------------------
A wrapper with `__torch_dispatch__` holds inner tensors, which it names in `__tensor_flatten__`: they stream,
as they are stored, and the wrapper is put together again around what has arrived. A class that only adds
attributes (and perhaps a `.to()` that moves them) has bytes of its own: they stream as a plain tensor's do,
and get the class and the attributes back. Nothing is dequantised on the way. What is neither goes through
its own `.to()` at each access. On the CPU, a class with a `.to()` may repack its bytes in a forward, so what
is there already is handed out as it is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

_WITH_CLASS = "_dynswap_dressed"


def is_plain(tensor: object) -> bool:
    """Whether a tensor's class adds nothing to its bytes."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def inner_names(master: torch.Tensor) -> list[str] | None:
    """The attributes in which a wrapper holds its inner tensors; None if it is no wrapper."""
    if not hasattr(type(master), "__tensor_unflatten__") or not hasattr(master, "__tensor_flatten__"):
        return None
    if master.requires_grad:
        return None  # the wrapper's own `.to()` is part of the graph
    names, _ = master.__tensor_flatten__()
    return list(names) if all(isinstance(getattr(master, name), torch.Tensor) for name in names) else None


def adds_attributes_only(master: torch.Tensor) -> bool:
    """Whether a master's bytes are all that it computes with, as far as torch knows."""
    cls: Any = type(master)
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def repacks_its_bytes(master: torch.Tensor) -> bool:
    """Return whether the class may repack the bytes of its tensors on the compute device.

    In its first forward on the CPU, bitsandbytes gives a 4-bit weight the layout of its kernels
    (`weight.data = packed`), and changes its quantisation state to match. A copy would not match that state.
    """
    cls: Any = type(master)
    return cls.to is not torch.Tensor.to


def rebuild_wrapper(
    master: torch.Tensor, inner: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """The wrapper around inner tensors that are on the device."""
    cls: Any = type(master)
    _, context = master.__tensor_flatten__()  # type: ignore[attr-defined]
    whole: torch.Tensor = cls.__tensor_unflatten__(inner, context, master.size(), master.stride())
    _give_attributes(whole, master, device, but=inner)
    return whole if whole.dtype == dtype else whole.to(device=device, dtype=dtype)


def flatten_wrapper(
    tensor: torch.Tensor,
) -> tuple[dict[str, torch.Tensor], Callable[[dict[str, torch.Tensor]], torch.Tensor]] | None:
    """A wrapper's inner tensors, and how to wrap such again; None if it is no wrapper."""
    names = inner_names(tensor)
    if names is None:
        return None
    cls: Any = type(tensor)
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    size, stride = tensor.size(), tensor.stride()

    def wrap(inner: dict[str, torch.Tensor]) -> torch.Tensor:
        return cls.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[no-any-return]

    return {name: getattr(tensor, name) for name in names}, wrap


def with_class_of(tensor: torch.Tensor, master: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A handed-out tensor with its master's class and attributes; one for as long as somebody has it."""
    known = vars(tensor).get(_WITH_CLASS)
    alive: Any = known() if known is not None else None
    if alive is None:
        cls: Any = type(master)
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            alive = torch.Tensor.as_subclass(tensor, cls)
        _give_attributes(alive, master, device)
        if cls.to is not torch.Tensor.to:
            alive = alive.to(device)  # it may have more to move than its bytes
        vars(alive)["_dynswap_tensor"] = tensor
        vars(tensor)[_WITH_CLASS] = weakref.ref(alive)
    return alive  # type: ignore[no-any-return]


def _give_attributes(
    tensor: torch.Tensor,
    master: torch.Tensor,
    device: torch.device,
    but: dict[str, torch.Tensor] | None = None,
) -> None:
    for name, value in vars(master).items():
        if name in (but or {}) or name.startswith("_dynswap"):
            continue
        if callable(getattr(value, "to", None)):
            # Some move themselves in place, and return nothing.
            own = value if isinstance(value, torch.Tensor) else copy.copy(value)
            moved = own.to(device)
            value = own if moved is None else moved
        vars(tensor)[name] = value
