"""An installed `torch.fx.GraphModule`, which writes its code on its class.

Note [Code on the class]
Each GraphModule has a class of its own. `recompile()` writes `forward` and `__call__` on the type of `self`,
and takes a `__call__` that it finds there for the user's. On a swap class the code would be lost with the
install, and the `__call__` of the original class, which looks for its continuation on the type of `self`
too, would find itself. So the original class is recompiled, and the swap class inherits from it as ever.
`__reduce__`, and an assignment to `graph`, recompile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from dynswap_ext._swap.state import as_plain

__all__ = ["namespace_for"]

#: Methods that write on the class; the second is that of torch's own lazy kind.
_RECOMPILES = ("recompile", "_real_recompile")


def namespace_for(cls: type) -> dict[str, Any]:
    """Return what the swap class of a GraphModule's class has to define; nothing for other classes."""
    if not issubclass(cls, torch.fx.GraphModule):
        return {}
    present = {name: inspect.getattr_static(cls, name, None) for name in _RECOMPILES}
    return {name: _recompiling(method) for name, method in present.items() if method is not None}


def _recompiling(method: Any) -> Callable[..., Any]:
    @functools.wraps(getattr(method, "__func__", method))
    def recompile(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = as_plain(self)
        try:
            return method.__get__(plain, type(plain))(*args, **kwargs)
        finally:
            # A new `__call__` of the original class hides the native provider's: Note [A call is a slot].
            getattr(self._dynswap_attribute, "serve_calls", _nothing)(type(self))

    return recompile


def _nothing(swap_class: type) -> None:
    """For a provider whose swap classes have a `__call__` of their own."""
