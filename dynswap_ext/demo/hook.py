"""The classic way, as a reference to measure against: weights cross to the device at each attribute read.

It does what installers of this kind are known to do, and no more: a class per module instance with a Python
``__getattr__`` that calls ``.to()`` on the weight. It neither prefetches nor remembers anything.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def install_hook(model: nn.Module, **to: Any) -> int:
    """Swap the class of each module of the tree; return how many classes that made.

    Parameters
    ----------
    model
        The model; its weights stay where they are.
    **to
        What each weight's ``.to()`` is called with: ``device``, ``dtype``.
    """
    modules = list(model.modules())
    for module in modules:
        module.__class__ = _hooked(module.__class__, to)
    return len(modules)


def uninstall_hook(model: nn.Module) -> None:
    """Give each module its class back."""
    for module in model.modules():
        module.__class__ = module.__class__.__bases__[0]


def _hooked(original: type, to: dict[str, Any]) -> type:
    def __getattr__(self: nn.Module, name: str) -> Any:
        parameters = self.__dict__["_parameters"]
        if name in parameters:
            parameter = parameters[name]
            if parameter is None:
                return None
            return nn.Parameter(parameter.to(**to), requires_grad=parameter.requires_grad)
        buffers = self.__dict__["_buffers"]
        if name in buffers:
            buffer = buffers[name]
            return None if buffer is None else buffer.to(**to)
        return original.__getattr__(self, name)  # type: ignore[attr-defined]

    return type(f"Hooked_{original.__name__}", (original,), {"__getattr__": __getattr__})
