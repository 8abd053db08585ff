"""The call of an installed module, for the pure-Python provider (native: csrc/bindings/call.cpp, saved.cpp).

What autograd saves of streamed weights is a reference, and backward fetches them again: see Note [Backward
fetches again].
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dynswap_ext._python.device_copy import DeviceCopy, Weight, copy_of, storage_address
from dynswap_ext._python.mapped_files import check_mapped
from dynswap_ext._swap.compile_support import release_inputs
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.untraced import untraced

_autograd: Any = torch._C._autograd


class _Thread(threading.local):
    depth = 0

    def __init__(self) -> None:
        #: Weights whose copies stay until the running module's call ends or another's begins.
        self.kept: dict[Weight, Any] = {}


_thread = _Thread()


def inside_call() -> bool:
    """Whether this thread is inside the call of an installed module."""
    return _thread.depth > 0


def keep(weight: Weight, session: Any) -> None:
    """Keep the weight's copy for the running module, which may ask for it again, as attention does."""
    weight.kept = True
    _thread.kept[weight] = session


def _end_of_call() -> None:
    kept = _thread.kept
    while kept:
        weight, session = kept.popitem()
        session.release_kept(weight)


def namespace_for(cls: type) -> dict[str, Any]:
    """What a swap class has to define, so that its instances' calls are known."""

    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call: Any = cls.__call__  # somebody may have patched it since
        if torch.compiler.is_dynamo_compiling():
            return call(self, *args, **kwargs)
        session = session_of(self)
        if session is not None and _thread.depth == 0:
            session.call_begins(self)
        if _thread.kept:
            _end_of_call()
        release_inputs()
        depth, hooked = _thread.depth, False
        try:  # whatever interrupts it, and wherever
            _thread.depth = depth + 1
            if session is not None and _refetch_wanted():
                _push()
                hooked = True
            return call(self, *args, **kwargs)
        except Exception as error:
            if session is not None and depth == 0:
                session.hooks.call_failed(session, error)
            raise
        finally:
            _thread.depth = depth
            if hooked:
                _autograd._pop_saved_tensors_default_hooks()
            if _thread.kept:
                _end_of_call()
            if session is not None and depth == 0:
                session.call_ends()

    return {"__call__": __call__}


class _SavedTensor:
    """Any other tensor."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: were it the tensor itself, an operation's output would own its own graph.
        self.tensor = tensor.detach()
        self.version = _version(self.tensor)

    def unpack(self) -> torch.Tensor:
        _refuse_if_written(self.version, self.tensor)
        return self.tensor


class _SavedWeight:
    """A streamed weight, or a view of one."""

    __slots__ = ("device", "dtype", "offset", "session", "shape", "strides", "version", "weight")

    def __init__(self, copy: DeviceCopy, weight: Weight, view: torch.Tensor) -> None:
        self.session, self.weight = copy.session, weight
        self.version = _version(weight.master)
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


_Saved = _SavedTensor | _SavedWeight


def _reference_to(tensor: torch.Tensor) -> _SavedWeight | None:
    copy = copy_of(tensor)
    weight = None if copy is None or tensor.is_conj() or tensor.is_neg() else copy.weight
    if copy is None or weight is None or weight.resident or not copy.current(weight.master):
        return None
    if copy.compare and not isinstance(weight.master, nn.Parameter):
        return None  # statistics, which the forward may write with no version's trace
    copy.write_back(weight.master)
    return _SavedWeight(copy, weight, tensor)


@untraced
def _pack(tensor: torch.Tensor) -> _Saved:
    return _reference_to(tensor) or _SavedTensor(tensor)


@untraced
def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.unpack()


def _over(inner_pack: Any, inner_unpack: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours, over hooks that go on seeing every tensor that is saved."""

    @untraced
    def pack(tensor: torch.Tensor) -> Any:
        saved = _reference_to(tensor)
        if saved is None:
            return inner_pack(tensor)
        return saved, inner_pack(_stand_in_for(tensor, saved))

    @untraced
    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is tuple and len(packed) == 2 and type(packed[0]) is _SavedWeight:
            inner_unpack(packed[1])
            return packed[0].unpack()
        tensor: torch.Tensor = inner_unpack(packed)
        # Saved whole in the forward pass, a stand-in when it was computed again.
        _, saved = _stand_ins.get(storage_address(tensor), (None, None))
        return tensor if saved is None else saved.unpack()

    return pack, unpack


#: By the address of their storage, which the weak reference keeps from being given to another.
_stand_ins: dict[int, tuple[Any, _SavedWeight]] = {}


def _stand_in_for(tensor: torch.Tensor, saved: _SavedWeight) -> torch.Tensor:
    for address, (storage, _) in list(_stand_ins.items()):
        if storage.expired():
            del _stand_ins[address]
    with torch.inference_mode(False), torch.no_grad():
        # Were it ever computed with, that should show.
        value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
        one = torch.full((1,), value, dtype=tensor.dtype, device=tensor.device)
    storage = StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
    _stand_ins[storage_address(one)] = storage, saved
    return one.expand(tensor.shape)


def _innermost() -> Any:
    return _autograd._top_saved_tensors_default_hooks(False)


def _refetch_wanted() -> bool:
    if not torch.is_grad_enabled() or not _autograd._saved_tensors_hooks_is_enabled():
        return False
    hooks = _innermost()
    return hooks is None or getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _push() -> None:
    hooks = _innermost()
    pack, unpack = (_pack, _unpack) if hooks is None else _over(*hooks)
    _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _refuse_if_written(saved: int, tensor: torch.Tensor) -> None:
    now = _version(tensor)
    if now != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {saved} instead."
        )
