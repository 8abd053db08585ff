"""Installs models that a program moves to a device on which they do not fit.

Note [A program that nobody edits]
----------------------------------
Programs move a model to the device in many ways. All of them end in `Module.to`, in `Module.cuda`, or in the
method of another device. `InstallMoved` wraps these methods. A model that fits is moved as usual. One that
does not fit is installed instead, together with the pipeline that moves it, if there is one. If a program
moves the parts of a model one by one, each part is moved or installed by itself. `LoadsOnHost` covers models
that transformers would load straight to the device. Adapters that peft moves to the device of their base are
always moved: they are small, are trained, and may be added when the install has left little memory.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from dynswap_ext._swap.device_moves import note_told
from dynswap_ext._swap.models import Installable, as_tree
from dynswap_ext._swap.state import modules_of, session_of, sessions_of
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext._util.warn import caller
from dynswap_ext.errors import ConfigError, DynswapError
from dynswap_ext.handle import Handle
from dynswap_ext.install import install

#: A model fits if it leaves at least this part of the device's memory free, for activations.
_ROOM: Final = 1 / 5
#: How the names of peft's modules begin. Peft moves each layer of an adapter by itself.
_ADAPTERS: Final = "peft."


class Moved(NamedTuple):
    """A model that `InstallMoved` has installed, or that it could not install and so has moved."""

    name: str  #: of the model's class
    nbytes: int  #: bytes of the weights that were to be moved, in the dtype that was asked for
    free: int  #: bytes of the device's memory that were free
    device: torch.device
    handle: Handle | None  #: None if the model could not be installed, and so was moved
    error: str = ""  #: why the model could not be installed


class InstallMoved:
    """A context in which models that do not fit the device are installed when a program moves them there.

    Parameters
    ----------
    always
        Whether models that fit are installed, too.
    tell
        Called with a `Moved` for each model after an attempt to install it.
    **options
        Options of `dynswap_ext.install` except `device`.
    """

    def __init__(self, *, always: bool, tell: Callable[[Moved], None], **options: Any) -> None:
        self._always = always
        self._tell = tell
        self._options = options
        self._originals: dict[str, Any] = {}
        self._inside = threading.local()

    def __enter__(self) -> InstallMoved:
        kind = getattr(torch.accelerator.current_accelerator(), "type", "cuda")
        for name in ("to", kind):
            self._originals[name] = original = getattr(nn.Module, name)
            setattr(nn.Module, name, self._looking(original, None if name == "to" else kind))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(nn.Module, name, original)

    def _looking(self, original: Callable[..., nn.Module], kind: str | None) -> Callable[..., nn.Module]:
        @functools.wraps(original)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            if getattr(self._inside, "move", False):  # a model's own `to` calls that of its parts
                return original(module, *args, **kwargs)
            self._inside.move = True
            try:
                device, rest = _target(kind, args, kwargs)
                if device is None or not self._installs(module, device, rest.get("dtype")):
                    return original(module, *args, **kwargs)
                return self._originals["to"](module, **rest) if rest else module
            finally:
                self._inside.move = False

        return move

    def _installs(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> bool:
        """Install a model if it does not fit. Return whether it computes on the device without a move."""
        if device.type in ("cpu", "meta") or caller().f_globals.get("__name__", "").startswith(_ADAPTERS):
            return False
        try:
            device = resolve_device(device)
        except ConfigError:
            return False  # torch will raise an error
        if (session := session_of(module)) is not None:
            return bool(session.device == device)
        given = _pipeline_that_moves(module) or module
        tree = as_tree(given)
        if sessions_of(modules_of(tree)):
            return False  # the program itself has installed parts of it
        memory = DeviceMemory(device)
        nbytes, free = _bytes_to_move(tree, device, dtype), memory.free()
        if not nbytes or (free - nbytes >= memory.total() * _ROOM and not self._always):
            return False
        name = type(given).__name__
        try:
            handle = install(given, device=device, **self._options)
        except DynswapError as error:
            self._tell(Moved(name, nbytes, free, device, None, str(error)))
            return False
        note_told(*sessions_of(modules_of(tree)))
        self._tell(Moved(name, nbytes, free, device, handle))
        return True


def _target(
    kind: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, dict[str, Any]]:
    """Return the device that a call of a moving method asks for, and its other arguments for `to`.

    `kind` is the name of the method, such as "cuda", or None for `Module.to`. The device is None if the call
    names none.
    """
    if kind is not None:
        given = args[0] if args else kwargs.get("device")
        return torch.device(kind, given) if isinstance(given, int) else torch.device(given or kind), {}
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):  # torch will raise an error
        return None, {}
    asked = {"dtype": dtype, "memory_format": memory_format}
    return device, {name: value for name, value in asked.items() if value is not None}


def _pipeline_that_moves(module: nn.Module) -> Installable | None:
    """Return the pipeline whose method `to` is calling that of the model; None if there is none."""
    frame = sys._getframe()
    for _ in range(8):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        owner: Any = frame.f_locals.get("self") if frame.f_code.co_name == "to" else None
        has_components = isinstance(getattr(type(owner), "components", None), property)
        if has_components and any(part is module for part in owner.components.values()):
            return owner
    return None


def _bytes_to_move(tree: nn.Module, device: torch.device, dtype: torch.dtype | None) -> int:
    found = {id(master): master for module in modules_of(tree) for _, master, _ in own_masters(module)}
    nbytes = 0
    for master in found.values():
        if master.device != device and not master.is_meta:
            cast = dtype if dtype is not None and master.is_floating_point() else master.dtype
            nbytes += master.numel() * cast.itemsize
    return nbytes
