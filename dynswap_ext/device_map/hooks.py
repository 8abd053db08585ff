"""Hooks that move what modules are called with, and what a model returns, to the devices of a device map."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from dynswap_ext._swap.state import modules_of, named_modules_of, session_of


class Bring:
    """A forward pre-hook that moves what a module is called with to the device of its install."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move the arguments, if the module is still installed there."""
        session = session_of(module)
        if session is None or session.device != self._device:  # uninstalled, installed again, or a copy
            return args, kwargs
        return _moved(args, self._device), _moved(kwargs, self._device)


class BringBack:
    """Hooks that move what a model returns to the device of the first tensor that it was called with."""

    def __init__(self) -> None:
        #: For each thread, those of the calls that it is in. The forward hook sees inputs that have moved.
        self._devices: dict[int, list[torch.device | None]] = {}

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the device of the first tensor that the model is called with: a forward pre-hook."""
        self._devices.setdefault(threading.get_ident(), []).append(next(_devices((args, kwargs)), None))

    def after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Move the output there: a forward hook, which is called after an error, too."""
        thread = threading.get_ident()
        calls = self._devices.get(thread) or [None]  # a copy may have been made in a call
        device = calls.pop()
        if not calls:
            self._devices.pop(thread, None)
        installed = any(session_of(module) is not None for _, module in named_modules_of(model))
        return _moved(output, device) if device is not None and installed else output


def forget_earlier(model: nn.Module) -> None:
    """Remove the hooks of an earlier install_by_device of the model."""
    for module in modules_of(model):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", hook), (Bring, BringBack)):
                    handle = RemovableHandle(
                        hooks,
                        extra_dict=[
                            module._forward_pre_hooks_with_kwargs,
                            module._forward_hooks_with_kwargs,
                            module._forward_hooks_always_called,
                        ],
                    )
                    handle.id = key
                    handle.remove()


def _devices(given: Any) -> Iterator[torch.device]:
    if isinstance(given, torch.Tensor):
        yield given.device
    elif isinstance(given, Mapping):
        yield from _devices(tuple(given.values()))
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _devices(each)


def _moved(given: Any, device: torch.device) -> Any:
    """Return what is given with its tensors on a device, the same object if none is elsewhere."""
    if isinstance(given, torch.Tensor):
        return given.to(device) if given.device != device else given
    if isinstance(given, PackedSequence):  # some of its tensors belong in RAM
        return given.to(device)  # type: ignore[arg-type]
    if isinstance(given, defaultdict):
        return defaultdict(given.default_factory, _moved(dict(given), device))
    if isinstance(given, Mapping):
        moved = {key: _moved(value, device) for key, value in given.items()}
        same = all(moved[key] is given[key] for key in moved)
        return given if same else type(given)(moved)  # type: ignore[call-arg]
    if isinstance(given, (list, tuple)):
        values = [_moved(value, device) for value in given]
        if all(a is b for a, b in zip(values, given, strict=True)):
            return given
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    return given
