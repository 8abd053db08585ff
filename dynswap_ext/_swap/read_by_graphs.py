"""Attributes of a module that a graph of torch.compile reads at each call, but does not trace.

Each parameter and buffer name of a swap class has some: see Note [Buffers are inputs of a graph].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dynswap_ext._util.untraced import untraced


def before_name(name: str) -> str:
    """Return the name of the attribute by which a graph reads a buffer as it was when the graph began."""
    return f"_dynswap_before_{name}"


def live_name(name: str) -> str:
    """Return the name of the attribute by which a graph reads the handed-out tensor of a buffer."""
    return f"_dynswap_live_{name}"


def dtype_name(name: str) -> str:
    """Return the name of the attribute by which a graph reads the dtype in which a master is handed out."""
    return f"_dynswap_dtype_{name}"


class _Lookup(dict[nn.Module, Any]):
    """Maps a module to what a function returns for it. It stays empty, so each lookup calls `__missing__`."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[nn.Module], Any]) -> None:
        self._read = read

    @untraced
    def __missing__(self, module: nn.Module) -> Any:
        return self._read(module)


def read_at_each_call(read: Callable[[nn.Module], Any]) -> property:
    """Return a property with the getter `read`, which torch.compile does not trace.

    The getter that torch.compile sees is a function in C, `dict.__getitem__`.
    """
    return property(_Lookup(untraced(read)).__getitem__)
