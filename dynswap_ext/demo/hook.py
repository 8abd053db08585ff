"""The classic way, as a reference to measure against: weights cross to the device at each attribute read.

It does what installers of this kind are known to do, and no more: a class per module instance with a Python
``__getattr__`` that calls ``.to()`` on the weight. It neither prefetches nor remembers anything.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def install_hook(model: nn.Module, **to: Any) -> None:
    """Swap the class of each module of the tree; `to` is what each weight's ``.to()`` is called with."""
    for module in list(model.modules()):
        module.__class__ = _hooked(module.__class__, to)


def uninstall_hook(model: nn.Module) -> None:
    """Give each module its class back."""
    for module in model.modules():
        module.__class__ = module.__class__.__bases__[0]


def _hooked(original: type, to: dict[str, Any]) -> type:
    def __getattr__(self: nn.Module, name: str) -> Any:
        parameter = self.__dict__["_parameters"].get(name)
        if parameter is not None:
            return nn.Parameter(parameter.to(**to), requires_grad=parameter.requires_grad)
        buffer = self.__dict__["_buffers"].get(name)
        if buffer is not None:
            return buffer.to(**to)
        return original.__getattr__(self, name)  # type: ignore[attr-defined]

    return type(f"Hooked_{original.__name__}", (original,), {"__getattr__": __getattr__})
