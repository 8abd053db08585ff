"""Serves module classes, most of them torch's own, that reach their weights otherwise than by attributes.

Note [Code on the class]
Each `torch.fx.GraphModule` has a class of its own. `recompile()` writes `forward` and `__call__` on the type
of `self`, and takes a `__call__` that it finds there for the user's. On a swap class the code would be lost
with the install. And the `__call__` of the original class, which looks on the type of `self` for the one to
call next, would find itself. So the original class is recompiled, and the swap class inherits from it as
usual. `__reduce__` recompiles, too, and so does an assignment to `graph`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList

from dynswap_ext._swap.state import as_plain, session_of

_LIST = "_flat_weights"
#: Methods of a GraphModule that write on its class; the second is that of torch's own lazy kind.
_RECOMPILE = ("recompile", "_real_recompile")


class _FlatWeights:
    """The list ``_flat_weights`` of an RNN. While the RNN is installed, its items are read as attributes."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        held = module.__dict__
        if session_of(module) is None:
            try:
                return held[_LIST]
            except KeyError:
                raise AttributeError(f"'{type(module).__name__}' object has no attribute '{_LIST}'") from None
        # torch may have put a new master into the list that it was given here.
        held[_LIST][:] = _masters_of(module)
        return [getattr(module, name, None) for name in held["_flat_weights_names"]]

    def __set__(self, module: Any, value: Any) -> None:
        # torch sets it to what attributes return, and after an uninstall it has to have the masters.
        module.__dict__[_LIST] = value if session_of(module) is None else _masters_of(module)

    def __delete__(self, module: Any) -> None:
        del module.__dict__[_LIST]


def _masters_of(rnn: Any) -> list[Any]:
    return [rnn._parameters.get(name) for name in rnn._flat_weights_names]


def put_masters_back(module: nn.Module) -> None:
    """Put an RNN's masters into its ``_flat_weights``, which may still have tensors that stood in for them.

    Has no effect on other modules.
    """
    held, masters = module.__dict__, module._parameters
    if _LIST in held and "_flat_weights_names" in held:
        named = zip(held["_flat_weights_names"], held[_LIST], strict=True)
        held[_LIST] = [masters.get(name, other) for name, other in named]


def _weights_have_changed(module: Any) -> bool:
    """Return whether torch has to make ``_flat_weights`` again, because the parameters are others by now."""
    if session_of(module) is not None:
        return False  # the list is made at each access
    return bool(nn.RNNBase._weights_have_changed(module))  # type: ignore[no-untyped-call]


# Each of the following does something around a method: `around(method, module, *arguments)`.


def _item_or_slice(item: Callable[..., Any], self: Any, index: Any) -> Any:
    # torch puts a slice into a new ParameterList, which takes leaves only, and what is handed out is none.
    if isinstance(index, slice) and session_of(self) is not None:
        return [self[i] for i in range(*index.indices(len(self)))]
    return item(self, index)


def _copied_dict(copy: Callable[..., Any], self: Any) -> Any:
    # torch makes a new ParameterDict, which takes leaves only, and what is handed out is none. `|` copies.
    return copy(self) if session_of(self) is None else dict(self.items())


def _fake_quantised(forward: Callable[..., Any], self: Any, x: torch.Tensor) -> Any:
    # At its first call torch resizes the buffers that it reads. So the masters are resized before that.
    buffers = vars(self)["_buffers"]
    if session_of(self) is not None and self.is_per_channel and buffers["observer_enabled"][0] == 1:
        for name in ("scale", "zero_point"):
            if buffers[name].numel() != x.shape[self.ch_axis]:
                buffers[name] = buffers[name].new_zeros(x.shape[self.ch_axis])
    return forward(self, x)


def _spectral_norm(forward: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    # The forward writes these in place and then reads them again. The tensors that were handed out first are
    # held until then: otherwise it would read what the masters have kept of the writes, which may be rounded.
    held = [getattr(self, name, None) for name in ("_u", "_v")]
    result = forward(self, *args, **kwargs)
    del held
    return result


def _reads_buffers(method: object) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and "_buffers" in code.co_names


# These are for a mapping of buffers, such as peft's `BufferDict`, which reads `_buffers` and no attributes.


def _item(item: Callable[..., Any], self: Any, key: Any) -> Any:
    found = item(self, key)
    if session_of(self) is None or not isinstance(found, torch.Tensor) or self._buffers.get(key) is not found:
        return found
    served = getattr(self, key)  # a method of that name hides the buffer
    return served if isinstance(served, torch.Tensor) else found


def _items(items: Callable[..., Any], self: Any) -> Any:
    return items(self) if session_of(self) is None else {key: self[key] for key in self}.items()


def _values(values: Callable[..., Any], self: Any) -> Any:
    return values(self) if session_of(self) is None else {key: self[key] for key in self}.values()


def _recompiled(recompile: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    plain = as_plain(self)
    try:
        return recompile.__get__(plain, type(plain))(*args, **kwargs)  # a class method in the lazy kind
    finally:
        # A new `__call__` of the original class hides the native provider's: Note [A call is a slot].
        getattr(self._dynswap_attribute, "serve_calls", lambda _: None)(type(self))


def _method(cls: type, name: str, around: Callable[..., Any]) -> dict[str, Any]:
    method: Any = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(method, "__func__", method))
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(method, self, *args, **kwargs)

    return {name: called}


def namespace_for(
    cls: type, join: Callable[[Any, Any], None], before_removal: Callable[[Any, str], None]
) -> dict[str, Any]:
    """Return what the swap class of `cls` has to define in addition; nothing for most classes.

    ``join(module, child)`` is called when a child has come into an installed module, so that it joins the
    install. ``before_removal(module, name)`` is called before a weight leaves its module.
    """

    def inserted(insert: Callable[..., Any], self: Any, index: int, module: nn.Module) -> Any:
        result = insert(self, index, module)  # it adds the module to `_modules` itself
        join(self, module)
        return result

    def deleted(delete: Callable[..., Any], self: Any, key: str) -> Any:
        child = self[key]
        if isinstance(child, ParametrizationList):  # torch puts its weight back into the module
            for name in (*child._parameters, *child._buffers):
                before_removal(child, name)
        return delete(self, key)

    if issubclass(cls, torch.fx.GraphModule):
        recompiled = [_method(cls, name, _recompiled) for name in _RECOMPILE if hasattr(cls, name)]
        return {name: method for each in recompiled for name, method in each.items()}
    if issubclass(cls, nn.RNNBase):
        # Their weights are kept a second time, in a plain list beside the parameters.
        return {_LIST: _FlatWeights(), "_weights_have_changed": _weights_have_changed}
    if issubclass(cls, (nn.Sequential, nn.ModuleList)):
        return _method(cls, "insert", inserted)
    if issubclass(cls, nn.ModuleDict):
        return _method(cls, "__delitem__", deleted)
    if issubclass(cls, nn.ParameterList):
        return _method(cls, "__getitem__", _item_or_slice)
    if issubclass(cls, nn.ParameterDict):
        return _method(cls, "copy", _copied_dict)
    if issubclass(cls, _SpectralNorm):
        return _method(cls, "forward", _spectral_norm)
    if _reads_buffers(getattr(cls, "__getitem__", None)):
        methods: dict[str, Callable[..., Any]] = {"__getitem__": _item, "items": _items, "values": _values}
        present = [_method(cls, name, around) for name, around in methods.items() if hasattr(cls, name)]
        return {name: method for each in present for name, method in each.items()}
    quantisation: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    if quantisation is not None and issubclass(cls, quantisation.FakeQuantize):
        return _method(cls, "forward", _fake_quantised)
    return {}
