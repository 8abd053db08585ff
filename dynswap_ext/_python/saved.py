"""What the graph keeps instead of the weights that autograd saves (pure-Python provider; native: saved.cpp).

See Note [Backward fetches again].
"""

from __future__ import annotations

import torch
from torch import nn

from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.mapped_files import check_mapped
from dynswap_ext._python.shown_copies import copy_of


class SavedTensor:
    """A saved tensor that is kept itself: it shows no streamed weight."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: were it the tensor itself, an operation's output would own its own graph.
        self.tensor = tensor.detach()
        self.version = version_of(self.tensor)

    def unpack(self) -> torch.Tensor:
        _refuse_if_written(self.version, self.tensor)
        return self.tensor


class SavedWeight:
    """A streamed weight, or a view of one."""

    __slots__ = ("device", "dtype", "offset", "session", "shape", "strides", "version", "weight")

    def __init__(self, copy: DeviceCopy, weight: Weight, view: torch.Tensor) -> None:
        self.session, self.weight = copy.session, weight
        self.version = version_of(weight.master)
        self.device, self.dtype = view.device, view.dtype
        self.shape, self.strides, self.offset = view.shape, view.stride(), view.storage_offset()

    def unpack(self) -> torch.Tensor:
        _refuse_if_written(self.version, self.weight.master)  # plain torch would have saved the master
        session = self.session()
        if session is None:  # the model was uninstalled since, or is gone
            check_mapped(self.weight.master)
            with torch.inference_mode(False), torch.no_grad():
                whole = self.weight.master.detach().to(self.device, self.dtype, copy=True)
                return whole.as_strided(self.shape, self.strides, self.offset)
        copy: DeviceCopy = session.fetch_again(self.weight)
        with torch.inference_mode(False), torch.no_grad():
            view = copy.data.as_strided(self.shape, self.strides, self.offset)
        view._dynswap_copy = copy  # type: ignore[attr-defined]  # it counts while somebody has it
        return view


Saved = SavedTensor | SavedWeight


def _shown_by(tensor: torch.Tensor) -> tuple[DeviceCopy, Weight] | None:
    """Return the copy whose bytes a tensor shows, and its weight, whose master has the same values."""
    copy = copy_of(tensor)
    weight = None if copy is None or tensor.is_conj() or tensor.is_neg() else copy.weight
    if copy is None or weight is None or not copy.current(weight.master):
        return None
    if copy.compare and not isinstance(weight.master, nn.Parameter):
        return None  # statistics, which the forward may write with no version's trace
    copy.write_back(weight.master)
    return copy, weight


def reference_to(tensor: torch.Tensor) -> SavedWeight | None:
    """Return the reference to keep instead of a tensor; None if the tensor is to be kept itself."""
    shown = _shown_by(tensor)
    return None if shown is None or shown[1].resident else SavedWeight(*shown, tensor)


def of_master(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what plain torch would have saved: a master, or a view of one; None if the tensor shows none."""
    shown = _shown_by(tensor)
    if shown is None:
        return None
    copy, weight = shown
    data, master = copy.data, weight.master
    if _layout(tensor) == _layout(data):
        return master
    # Of a master with gaps, or of a conjugate, a view of the copy is none of the master's memory.
    if data.stride() != master.stride() or master.is_conj() or master.is_neg():
        return None
    offset = master.storage_offset() + tensor.storage_offset() - data.storage_offset()
    with torch.no_grad():
        return master.as_strided(tensor.shape, tensor.stride(), offset)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same bytes in the same way."""
    if one is other:
        return True
    plain = type(one) in (torch.Tensor, nn.Parameter)
    if not plain or not one.layout is other.layout is torch.strided:
        return False
    return (
        one.data_ptr() == other.data_ptr()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and (one.dtype, *_layout(one)) == (other.dtype, *_layout(other))
    )


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    strides, offset = tensor.stride(), tensor.storage_offset()
    return tensor.shape, strides, offset, tensor.is_conj(), tensor.is_neg()


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _refuse_if_written(saved: int, tensor: torch.Tensor) -> None:
    now = version_of(tensor)
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {saved} instead."
        )
