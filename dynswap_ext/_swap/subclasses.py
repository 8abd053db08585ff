"""Serves masters of tensor subclasses, such as quantised weights.

Note [Subclasses are taken apart]
---------------------------------
A wrapper with `__torch_dispatch__` holds inner tensors, which it names in `__tensor_flatten__`. The inner
tensors stream as they are stored, and a new wrapper is made around what has arrived. A wrapper that requires
gradients (transformers leaves those of quantised checkpoints so) streams only under `no_grad()`: an autograd
graph contains the wrapper's own `.to()`. A class that only adds attributes, and perhaps a `.to()` that moves
them, has bytes of its own. These stream as a plain tensor's do, and get the class and the attributes back
(native provider). Nothing is dequantised on the way. Any other master goes through its own `.to()` at each
access. On the CPU, a class with a `.to()` may repack its bytes in a forward, so a master that is there
already is handed out as it is.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

import torch

from dynswap_ext._swap.set_attributes import handed_out_before, moved, note_handed_out
from dynswap_ext.lossless.tensor import Content, LosslessTensor

_WITH_CLASS = "_dynswap_dressed"
#: Whether `.to(dtype)` of a wrapper class leaves the inner tensors as they are.
_keeps_inner: Final[dict[type, bool]] = {}


def is_plain(tensor: object) -> bool:
    """Return whether an object is a `torch.Tensor` or an `nn.Parameter`, and not of another subclass."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def inner_names(master: torch.Tensor) -> list[str] | None:
    """Return the attributes in which a wrapper holds its inner tensors; None for any other tensor."""
    if not hasattr(type(master), "__tensor_unflatten__") or not hasattr(master, "__tensor_flatten__"):
        return None
    names, _ = master.__tensor_flatten__()
    return list(names) if all(isinstance(getattr(master, name), torch.Tensor) for name in names) else None


def adds_attributes_only(master: torch.Tensor) -> bool:
    """Return whether a master computes with its own bytes: its class does not override torch's dispatch."""
    cls: Any = type(master)
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class HeldContent(NamedTuple):
    """Where the values of a coded master are: Note [A coded weight is an exact weight]."""

    #: What the master shares with its aliases.
    content: Content
    #: Plain values, or all coded bytes of the tensor that the master is a part of.
    held: torch.Tensor
    #: Of that tensor, the master's first weight; None if the values are plain.
    first: int | None
    #: How many weights that tensor has.
    weights: int


def _held_content(master: LosslessTensor) -> HeldContent | bool:
    content = master._dynswap_content
    master.make_plain_unless_range()
    coded = content.coded  # read first: it is dropped after `plain` is set
    if coded is None:
        return HeldContent(content, master.decoded(), None, master.numel())
    if not master.is_range():
        return False
    return HeldContent(content, coded, int(master.storage_offset()), content.count)


def inner_names_or_streams(master: torch.Tensor, in_place: bool) -> list[str] | HeldContent | bool:
    """Return the names of a wrapper's inner tensors; for any other master, whether its own bytes stream.

    For a coded master, return where its values are.

    `in_place`: the master is on the compute device already, in the wanted dtype. Then the class may repack
    its bytes there: in its first forward on the CPU, bitsandbytes gives a 4-bit weight the layout of its
    kernels (`weight.data = packed`), and changes its quantisation state to match. A copy would not match.
    """
    if isinstance(master, LosslessTensor):
        return _held_content(master)
    names = inner_names(master)
    if names is not None:
        return names
    cls: Any = type(master)
    return adds_attributes_only(master) and not (in_place and cls.to is not torch.Tensor.to)


def rebuild_subclass(
    master: torch.Tensor,
    parts: torch.Tensor | dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, bool]:
    """Return a tensor of the master's class made of `parts` on the device, and whether it was made now.

    `parts` are a wrapper's inner tensors, or the plain tensor that has the bytes of another subclass. As long
    as an earlier result for the same master and parts is alive, that is returned again.
    """
    if isinstance(parts, dict):
        return _rebuild_wrapper(master, parts, device, dtype)
    return _with_class_of(master, parts, device)


def _rebuild_wrapper(
    master: torch.Tensor, inner: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    whole = handed_out_before(master, inner)
    is_new = whole is None or whole.dtype != dtype
    if whole is None or is_new:
        cls: Any = type(master)
        _, context = master.__tensor_flatten__()  # type: ignore[attr-defined]
        whole = cls.__tensor_unflatten__(inner, context, master.size(), master.stride())
        _give_attributes(whole, master, device, but=inner)
        if whole.dtype != dtype:
            whole = _cast(whole, inner, dtype)
        note_handed_out(whole, master)
    return whole, is_new


def _with_class_of(
    master: torch.Tensor, tensor: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, bool]:
    known = vars(tensor).get(_WITH_CLASS)
    alive: Any = known() if known is not None else None
    is_new = alive is None
    if is_new:
        cls: Any = type(master)
        with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            alive = torch.Tensor.as_subclass(tensor, cls)
        _give_attributes(alive, master, device)
        if cls.to is not torch.Tensor.to:
            alive = alive.to(device)  # it may have more to move than its bytes
        vars(alive)["_dynswap_tensor"] = tensor
        vars(tensor)[_WITH_CLASS] = weakref.ref(alive)
        note_handed_out(alive, master)
    return alive, is_new


def _cast(whole: torch.Tensor, inner: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a wrapper cast to a dtype, with the same inner tensors if its class leaves these as they are."""
    cls: Any = type(whole)
    made: Any = whole.to(dtype=dtype)
    if cls not in _keeps_inner:
        _keeps_inner[cls] = type(made) is cls and all(
            _same(getattr(made, name), tensor) for name, tensor in inner.items()
        )
    if _keeps_inner[cls]:
        for name, tensor in inner.items():
            setattr(made, name, tensor)
    for name, value in vars(whole).items():
        vars(made).setdefault(name, value)  # attributes that other code has set
    return made  # type: ignore[no-any-return]


def _same(one: Any, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values, in the same class, dtype and strides."""
    alike = type(one) is type(other) and one.dtype == other.dtype and one.stride() == other.stride()
    return alike and torch.equal(one, other)


def _give_attributes(
    tensor: torch.Tensor,
    master: torch.Tensor,
    device: torch.device,
    but: dict[str, torch.Tensor] | None = None,
) -> None:
    for name, value in vars(master).items():
        if name in (but or {}) or name.startswith("_dynswap"):
            continue
        vars(tensor)[name] = moved(value, device)
