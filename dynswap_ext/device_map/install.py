"""Installs of the parts of one model, each on a device of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dynswap_ext._swap.state import modules_of, named_modules_of
from dynswap_ext._util.devices import resolve_device
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.device_map.homes import by_first_path, homes_of, names
from dynswap_ext.device_map.hooks import Bring, BringBack, forget_earlier
from dynswap_ext.errors import ConfigError
from dynswap_ext.handle import Handle
from dynswap_ext.install import install

#: A device as torch names it; a number is an accelerator's index.
Device: TypeAlias = torch.device | str | int


class Handles(Mapping[torch.device, Handle]):
    """The handles of one model's installs, by device. Leaving its ``with`` block uninstalls all of them."""

    def __init__(self, handles: dict[torch.device, Handle], hooks: list[RemovableHandle]) -> None:
        self._handles = handles
        self._hooks = hooks

    def __getitem__(self, device: Device) -> Handle:
        """Return the handle of the install on a device, as in ``handles["cuda:1"]`` or ``handles[1]``."""
        try:
            return self._handles[resolve_device(device)]
        except (ConfigError, KeyError):
            there = ", ".join(map(str, self))
            raise KeyError(f"nothing is installed on {device}, only on {there}") from None

    def __iter__(self) -> Iterator[torch.device]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __repr__(self) -> str:
        return f"<dynswap_ext.Handles on {', '.join(map(str, self))}>"

    def __str__(self) -> str:
        """Return the report of each device."""
        return "\n\n".join(f"{device}\n{handle.report()}" for device, handle in self._handles.items())

    def uninstall(self) -> None:
        """Uninstall the model from all devices. It computes where its weights are from then on."""
        with ExitStack() as stack:  # all of them, even if one raises an error
            for handle in self._handles.values():
                stack.callback(handle.uninstall)
            for hook in self._hooks:
                stack.callback(hook.remove)

    def __enter__(self) -> Handles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.uninstall()


def install_by_device(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    budget: int | float | str | Mapping[str, int | float | str] | None = None,
    **options: Any,
) -> Handles:
    """Install the parts of a model on several devices, each with a budget and a bus of its own.

    The tensors that a module of the mapping is called with move to its device, and those that the model
    returns move to the device of the first tensor that it was called with, as with a `device_map` of
    accelerate. The devices take turns. To have all of them compute at the same time, each with other inputs,
    start a rank for each device (see `share_masters`).

    Parameters
    ----------
    model : torch.nn.Module
        As for `install`: its weights in RAM or mapped from files. Load it without a `device_map`.
    device_map : mapping of str to torch.device, str or int
        The device on which a module computes, with all that is in it, by the path of the module:
        ``{"embed": 0, "layers.0-15": 0, "layers.16-*": 1, "head": 1}``. Each module that has weights or
        buffers needs a key, or one for a module around it. A word of a key may be a range of numbers, or have
        ``*`` and ``?``. The most exact key counts: "layers.5" before "layers.0-15" before "layers.*", and
        each of them before "layers". A number is an accelerator's index. What
        `accelerate.infer_auto_device_map` returns is such a mapping, unless it has "disk". A block that adds
        its input to what its parts return (a residual) belongs on one device.
    budget : int, float, str, or mapping of str to these, optional
        The memory for weights on each device, as for `install`; or by device:
        ``{"cuda:0": "6GiB", "cuda:1": "auto"}``.
    **options
        The other options of `install`, but `device`. They apply to each device.

    Returns
    -------
    Handles
        The handle of each device's install.

    Raises
    ------
    ConfigError
        A key names no module, a module has no device or several, or an install is refused.

    Notes
    -----
    After an error, no part of the model is installed.
    """
    if "device" in options:
        raise TypeError("install_by_device() takes the devices as its second argument, not as device=")
    if not isinstance(device_map, Mapping) or not all(isinstance(key, str) for key in device_map):
        given: object = device_map
        automatic = (
            ". accelerate.infer_auto_device_map(model, max_memory) makes one" if given == "auto" else ""
        )
        raise ConfigError(
            f"device_map is {device_map!r}; expected a mapping of modules to devices, such as "
            f"{{'layers.0-15': 0, 'layers.16-*': 1}}{automatic}"
        )
    keys = by_first_path(model, {key: _device(key, given) for key, given in device_map.items()})
    homes = homes_of(model, keys)
    parts = _parts(model, homes)
    budgets = _budgets(budget, list(parts))
    handles: dict[torch.device, Handle] = {}
    hooks: list[RemovableHandle] = []
    made = Handles(handles, hooks)
    try:
        for device, modules in parts.items():
            part = modules.get("", modules)  # the model, else some of its modules
            handles[device] = install(part, device=device, budget=budgets[device], **options)
        forget_earlier(model)
        hooks += [
            module.register_forward_pre_hook(Bring(device), prepend=True, with_kwargs=True)
            for module, device in _called(model, keys, homes).items()
        ]
        back = BringBack()
        hooks.append(model.register_forward_pre_hook(back.before, prepend=True, with_kwargs=True))
        hooks.append(model.register_forward_hook(back.after, with_kwargs=True, always_call=True))
    except BaseException:
        made.uninstall()
        raise
    return made


def _device(key: str, given: Device) -> torch.device:
    if given == "disk":
        raise ConfigError(
            f"device_map has 'disk' for {key!r}; expected the device where it computes: its weights stream "
            "to it from RAM or from a file"
        )
    return resolve_device(given)


def _budgets(budget: Any, devices: list[torch.device]) -> dict[torch.device, Any]:
    """Return the budget of each device."""
    if not isinstance(budget, Mapping):
        return dict.fromkeys(devices, budget)
    given = {resolve_device(device): amount for device, amount in budget.items()}
    for device in (*given, *devices):
        if device not in given or device not in devices:
            raise ConfigError(
                f"budget is by device, and {'has none for' if device in devices else 'names'} '{device}'; "
                f"expected one for each of {', '.join(map(str, devices))}"
            )
    return given


def _devices_of(module: nn.Module, homes: Mapping[nn.Module, torch.device]) -> set[torch.device]:
    """Return the devices of the weights in a module."""
    return {homes[each] for each in modules_of(module) if own_masters(each)}


def _parts(
    model: nn.Module, homes: Mapping[nn.Module, torch.device]
) -> dict[torch.device, dict[str, nn.Module]]:
    """Return what to install on each device, by path, in an order in which no install takes another's."""
    parts: dict[torch.device, dict[str, nn.Module]] = {}
    order: TopologicalSorter[torch.device] = TopologicalSorter()
    covered: dict[torch.device, set[nn.Module]] = {}
    around: dict[tuple[torch.device, torch.device], str] = {}
    for path, module in named_modules_of(model):
        there = _devices_of(module, homes)
        if not there or (len(there) > 1 and not own_masters(module)):
            continue
        device = next(iter(there)) if len(there) == 1 else homes[module]
        if module not in covered.setdefault(device, set()):
            parts.setdefault(device, {})[path] = module
            covered[device].update(modules_of(module))
        for later in there - {device}:  # whose install takes its parts of this one
            order.add(later, device)
            around.setdefault((device, later), path)
    for device in parts:
        order.add(device)
    try:
        return {device: parts[device] for device in order.static_order()}
    except CycleError as error:
        conflict = " and ".join(
            f"{repr(path) if path else 'the model'} computes on {device} around modules on {other}"
            for path, device, other in sorted((around[pair], *pair) for pair in pairwise(error.args[1]))
        )
        raise ConfigError(
            f"{conflict}; expected one of these on one device, with all that is in it"
        ) from None


def _called(
    model: nn.Module, keys: Mapping[str, torch.device], homes: Mapping[nn.Module, torch.device]
) -> dict[nn.Module, torch.device]:
    """Return the modules that get what they are called with on their device, with the device."""
    found = dict(_entries(model, homes))
    for path, module in named_modules_of(model):
        # The program may call it itself, as `generate` calls an encoder.
        if module in homes and module not in found and any(names(key, path) for key in keys):
            found |= _entries(module, homes)
    return found


def _entries(
    module: nn.Module, homes: Mapping[nn.Module, torch.device]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the modules through which what computes on one device is called, with the device."""
    there = _devices_of(module, homes)
    if not there:
        return
    called = type(module).forward is not nn.Module.forward
    if called and (len(there) == 1 or module in homes):
        yield module, next(iter(there)) if len(there) == 1 else homes[module]
    if not called or len(there) > 1:
        for child in module.children():
            yield from _entries(child, homes)
