"""The devices that there are, and the one that an option names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dynswap_ext._util.option_names import is_amount
from dynswap_ext.errors import ConfigError


def available_devices() -> tuple[str, ...]:
    """Return the names of the devices that can compute now, such as "cpu" and "cuda:0".

    Initialises the driver: for CUDA, torch asks the runtime.
    """
    return listed_devices() if torch.accelerator.is_available() else ("cpu",)


def listed_devices() -> tuple[str, ...]:
    """Return the names of the devices that the system lists, such as "cpu" and "cuda:0".

    For CUDA, torch asks NVML if it is there, so that the driver is not initialised.
    """
    accelerator = torch.accelerator.current_accelerator()
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return ("cpu", *(f"{accelerator}:{index}" for index in range(count)))


def resolve_device(given: torch.device | str | int | None) -> torch.device:
    """Return the device that an option names; for None the accelerator, or the CPU if there is none.

    An accelerator gets an index, so that it compares equal to the device of a tensor. Raises ConfigError for
    a device that is not available here.
    """
    if given is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        given = accelerator or "cpu"
    try:
        if isinstance(given, bool):
            raise TypeError("a bool is no device")
        device = torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        index = (
            isinstance(given, int) and not isinstance(given, bool) and not torch.accelerator.is_available()
        )
        what = "the index of an accelerator, of which torch finds none" if index else "unknown to torch"
        raise ConfigError(
            f"device is {given!r}, {what}; available here: {', '.join(available_devices())}"
            + (_why_not(torch.device("cuda")) if index else "")
            + (f". An amount of memory is a budget: budget={given!r}" if is_amount(given) else "")
            + (". install_by_device(model, device_map) takes several" if isinstance(given, Mapping) else "")
        ) from error
    if isinstance(given, str) and ":" in given and str(device) != given:  # torch keeps 8 bits of the index
        raise ConfigError(
            f"device is {given!r}, whose index is too large: torch would use {str(device)!r}; available "
            f"here: {', '.join(available_devices())}"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None and f"{device.type}:0" in available_devices():
        return torch.device(device.type, torch.accelerator.current_device_index())
    if str(device) not in available_devices():
        here = ", ".join(available_devices())
        raise ConfigError(f"device is '{device}'; available here: {here}{_why_not(device)}")
    return device


def _why_not(device: torch.device) -> str:
    """Return why a device cannot be used and what to do, as the end of a message; empty if not known."""
    if device.type == "meta":
        return (
            ". Nothing is computed on the meta device; for shapes, call an installed model under "
            "FakeTensorMode(allow_non_fake_inputs=True)"
        )
    if device.type != "cuda" or torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return (
            f". This torch ({torch.__version__}) is built without CUDA; install one that has it "
            "(https://pytorch.org/get-started/locally)"
        )
    return f". This torch ({torch.__version__}) has CUDA, but finds no driver or no GPU; see `nvidia-smi`"
