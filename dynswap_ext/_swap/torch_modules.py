"""What some of torch's own module classes do with their weights beside reading attributes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm

from dynswap_ext._swap.state import session_of

__all__ = ["namespace_for", "put_masters_back"]

_LIST = "_flat_weights"
Join = Callable[[Any, Any], None]


class _FlatWeights:
    """Serves ``_flat_weights`` through the attributes, so that an installed RNN computes where it should."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        held = module.__dict__
        if session_of(module) is None:
            try:
                return held[_LIST]
            except KeyError:
                raise AttributeError(f"'{type(module).__name__}' object has no attribute '{_LIST}'") from None
        masters = held["_parameters"]
        # torch may have put a new master into the list that it was given here.
        held[_LIST][:] = [masters.get(name) for name in held["_flat_weights_names"]]
        return [getattr(module, name, None) for name in held["_flat_weights_names"]]

    def __set__(self, module: Any, value: Any) -> None:
        held = module.__dict__
        if session_of(module) is not None:
            # torch fills it from attributes; what stays after an uninstall has to be the masters.
            masters = held["_parameters"]
            value = [masters.get(name) for name in held["_flat_weights_names"]]
        held[_LIST] = value

    def __delete__(self, module: Any) -> None:
        del module.__dict__[_LIST]


def put_masters_back(module: nn.Module) -> None:
    """Give an RNN's list its masters, as it may have others still that took their places for a while."""
    held, masters = module.__dict__, module._parameters
    if _LIST in held and "_flat_weights_names" in held:
        named = zip(held["_flat_weights_names"], held[_LIST], strict=True)
        held[_LIST] = [masters.get(name, other) for name, other in named]


def _weights_have_changed(module: Any) -> bool:
    """Torch compares the parameters with weak references to those of the list, to build it anew."""
    if session_of(module) is not None:
        return False  # the list is made at each access
    return bool(nn.RNNBase._weights_have_changed(module))  # type: ignore[no-untyped-call]


def _inserter(cls: type, join: Join) -> Callable[..., Any]:
    # It adds the module to `_modules` itself.
    insert: Callable[..., Any] = cls.insert  # type: ignore[attr-defined]

    @functools.wraps(insert)
    def inserting(self: Any, index: int, module: nn.Module) -> Any:
        result = insert(self, index, module)
        join(self, module)
        return result

    return inserting


def _item_or_slice(cls: type) -> Callable[..., Any]:
    # torch puts a slice into a new ParameterList, which takes leaves only.
    item: Callable[..., Any] = getattr(cls, "__getitem__")  # noqa: B009

    @functools.wraps(item)
    def __getitem__(self: Any, index: Any) -> Any:
        if isinstance(index, slice) and session_of(self) is not None:
            return [self[i] for i in range(*index.indices(len(self)))]
        return item(self, index)

    return __getitem__


def _copier(cls: type) -> Callable[..., Any]:
    # The same of a ParameterDict; `|` goes through it.
    copy: Callable[..., Any] = cls.copy  # type: ignore[attr-defined]

    @functools.wraps(copy)
    def copying(self: Any) -> Any:
        return copy(self) if session_of(self) is None else dict(self.items())

    return copying


def _fake_quantiser(cls: type) -> Callable[..., Any]:
    # At its first call it resizes what it was handed out; the masters are resized for it.
    forward: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def forwarding(self: Any, x: torch.Tensor) -> Any:
        buffers = vars(self)["_buffers"]
        if session_of(self) is not None and self.is_per_channel and buffers["observer_enabled"][0] == 1:
            for name in ("scale", "zero_point"):
                if buffers[name].numel() != x.shape[self.ch_axis]:
                    buffers[name] = buffers[name].new_zeros(x.shape[self.ch_axis])
        return forward(self, x)

    return forwarding


def _holder(cls: type, *names: str) -> Callable[..., Any]:
    # It writes these in place and then reads them: what it was handed out first lives until it has, or it
    # would read what the masters keep of that, which may be rounded.
    forward: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]

    @functools.wraps(forward)
    def forwarding(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = [getattr(self, name, None) for name in names]
        result = forward(self, *args, **kwargs)
        del held
        return result

    return forwarding


def namespace_for(cls: type, join: Join) -> dict[str, Any]:
    """What the swap class of a class of torch's has to define; nothing for most classes.

    Parameters
    ----------
    cls : type
        The original class.
    join : callable
        ``join(module, child)`` lets a child that came into an installed module join its install.
    """
    if issubclass(cls, nn.RNNBase):
        # Their weights are kept a second time, in a plain list beside the parameters.
        return {_LIST: _FlatWeights(), "_weights_have_changed": _weights_have_changed}
    if issubclass(cls, (nn.Sequential, nn.ModuleList)):
        return {"insert": _inserter(cls, join)}
    if issubclass(cls, nn.ParameterList):
        return {"__getitem__": _item_or_slice(cls)}
    if issubclass(cls, nn.ParameterDict):
        return {"copy": _copier(cls)}
    if issubclass(cls, _SpectralNorm):
        return {"forward": _holder(cls, "_u", "_v")}
    quantisation: Any = sys.modules.get("torch.ao.quantization.fake_quantize")
    if quantisation is not None and issubclass(cls, quantisation.FakeQuantize):
        return {"forward": _fake_quantiser(cls)}
    return {}
