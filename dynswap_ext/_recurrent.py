"""LSTM, GRU and RNN: torch keeps their weights a second time, in a plain list beside the parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._state import session_of

__all__ = ["namespace_for"]

_LIST = "_flat_weights"


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


def _weights_have_changed(module: Any) -> bool:
    """Torch compares the parameters with weak references to those of the list, to build it anew."""
    if session_of(module) is not None:
        return False  # the list is made at each access
    return bool(nn.RNNBase._weights_have_changed(module))  # type: ignore[no-untyped-call]


def namespace_for(cls: type) -> dict[str, Any]:
    """What the swap class of a recurrent module has to define; nothing for any other class."""
    if not issubclass(cls, nn.RNNBase):
        return {}
    return {_LIST: _FlatWeights(), "_weights_have_changed": _weights_have_changed}
