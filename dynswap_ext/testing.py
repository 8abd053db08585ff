"""Helpers to test models that are installed; the package's own tests use them too."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dynswap_ext._swap.changed_elements import bits
from dynswap_ext._util.dtypes_as_loaded import dtypes_as_loaded
from dynswap_ext.handle import Handle

__all__ = ["assert_bit_equal", "assert_nothing_held", "differences", "map_from_file", "move", "moved"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def moved(model: ModuleT, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> ModuleT:
    """Return a plain copy of the model on the device: an installed model has to give the same bits.

    Parameters
    ----------
    model : torch.nn.Module
        Installed or not.
    device, dtype
        The same as for the install. Models of transformers and diffusers get the dtypes of their
        ``from_pretrained(dtype=...)``, which keeps some weights and buffers in another dtype.
    """
    return move(copy.deepcopy(model), device, dtype)


def move(model: ModuleT, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> ModuleT:
    """Move and cast a model that is not installed, in place, and return it.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which must not be installed.
    device, dtype
        The same as for the install to compare with. Models of transformers and diffusers get the dtypes of
        their ``from_pretrained(dtype=...)``, which keeps some weights and buffers in another dtype.
    """
    places = [(module, key, p) for module in model.modules() for key, p in module._parameters.items()]
    others = [
        (module, name, getattr(module, name).detach(), loaded)
        for (module, name), loaded in dtypes_as_loaded(model, dtype).items()
    ]
    model.to(device=device, dtype=dtype)
    if torch.device(device).type == torch._C._get_privateuse1_backend_name():
        # On such a device `to()` makes a new parameter in each module, so that tied ones come apart.
        firsts: dict[int, nn.Parameter | None] = {}
        for module, key, before in places:
            module._parameters[key] = firsts.setdefault(id(before), module._parameters[key])
    for module, name, value, loaded in others:
        getattr(module, name).data = value.to(device, loaded)
    return model


def assert_bit_equal(actual: Any, expected: Any, what: str = "value") -> None:
    """Assert that tensors, or nested sequences and mappings of tensors, are equal to the bit.

    NaN equals a NaN of the same bits, and 0.0 does not equal -0.0. Shape, dtype and device have to agree.
    """
    found = differences(actual, expected, what)
    assert not found, "; ".join(found)


def differences(actual: Any, expected: Any, what: str = "value") -> list[str]:
    """Return the differences for which `assert_bit_equal` would fail, one sentence each."""
    if isinstance(expected, torch.Tensor):
        return _tensor_differences(actual, expected, what)
    if isinstance(expected, Mapping):
        if set(actual) != set(expected):
            return [f"{what} has the keys {sorted(actual)}, expected {sorted(expected)}"]
        return [
            text for key in expected for text in differences(actual[key], expected[key], f"{what}[{key!r}]")
        ]
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if len(actual) != len(expected):
            return [f"{what} has {len(actual)} elements, expected {len(expected)}"]
        pairs = enumerate(zip(actual, expected, strict=True))
        return [text for i, (a, e) in pairs for text in differences(a, e, f"{what}[{i}]")]
    return [] if actual == expected else [f"{what} is {actual!r}, expected {expected!r}"]


def _tensor_differences(actual: Any, expected: torch.Tensor, what: str) -> list[str]:
    if not isinstance(actual, torch.Tensor):
        return [f"{what} is {actual!r}, expected a tensor"]
    for key in ("shape", "dtype", "device"):
        if getattr(actual, key) != getattr(expected, key):
            return [f"{what} has {key} {getattr(actual, key)}, expected {getattr(expected, key)}"]
    with torch.no_grad():
        unequal = bits(actual.detach()) != bits(expected.detach())
        count = int(unequal.sum())
    if not count:
        return []
    index = tuple(int(i) for i in unequal.nonzero()[0])
    found, wanted = actual.detach()[index].item(), expected.detach()[index].item()
    return [
        f"{what} differs in {count} of {unequal.numel()} elements, first at {index}: {found!r} for {wanted!r}"
    ]


def assert_nothing_held(handle: Handle) -> None:
    """Assert that no tensor that `module.weight` returned holds device memory any more."""
    if handle.stats().live_leases:
        gc.collect()  # for reference cycles, such as those of an exception's traceback
    live = handle.stats().live_leases
    assert live == 0, f"{live} handed-out tensors still hold their place on the device"


def map_from_file(model: ModuleT, path: str | os.PathLike[str]) -> ModuleT:
    """Write the model's state to a file, and map its parameters and buffers from there.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which must not be installed. It is changed in place.
    path : path-like
        The file. It must outlive the model.

    Returns
    -------
    torch.nn.Module
        The model itself.
    """
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
    return model
