"""`model.__call__(x)`, which `generate` of transformers uses for each token: a call like `model(x)`.

For providers that notice calls in a slot of the type: Note [A call is a slot] in csrc/python/call.h.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any, Final

import torch

_CALL: Final = "__call__"


class _CallByName:
    """The ``__call__`` of a swap class for those that read it. Calls go through the type's slot."""

    def __init__(self, original: type) -> None:
        self._original = original

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        plain: Any = self._original.__call__  # looked up each time, as it may have been patched
        if module is None:
            return plain
        if torch.compiler.is_dynamo_compiling() or _torch_compile_asks() or not self._is_of(type(module)):
            return plain.__get__(module, owner)
        # Python itself comes here, for a call, if it has set the slot anew.
        module._dynswap_attribute.serve_calls(type(module))
        return MethodType(_called, module)

    def _is_of(self, cls: type) -> bool:
        """Return whether a class has no ``__call__`` of its own, from which ``super()`` has come here."""
        return next(base.__dict__[_CALL] for base in cls.__mro__ if _CALL in base.__dict__) is self


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self(*args, **kwargs)


def _torch_compile_asks() -> bool:
    """Return whether torch.compile reads the attribute. It expects that of nn.Module."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch._dynamo")


def namespace_for(cls: type) -> dict[str, Any]:
    """Return the ``__call__`` of the swap class of `cls`."""
    return {_CALL: _CallByName(cls)}
