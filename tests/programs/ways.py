"""Runs a whole program on a plain model and on an installed one, and compares; and ways to install."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dynswap_ext
from conftest import PRETEND, Provider
from dynswap_ext import testing
from dynswap_ext._util.dtypes_as_loaded import dtypes_as_loaded
from programs import bytes_of, seeded

#: Values of `Way.budget`, which `install` turns into bytes.
ALL_RESIDENT, LEAST = "all resident", "least"


@dataclass(frozen=True)
class Way:
    """A way to install a model."""

    name: str
    #: Whether its masters are mapped from a file, from which they are streamed on the CPU.
    mapped: bool = False
    #: `ALL_RESIDENT`, `LEAST`, or None for the default of `install`.
    budget: str | None = None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    def streams(self, provider: Provider) -> bool:
        """Return whether weights have to be moved. Pure Python hands mapped memory out as it is."""
        if provider.device.type != "cpu" or self.dtype is not None:
            return True
        return self.mapped and provider.native


DEFAULT = Way("default")
MAPPED = Way("mapped", mapped=True)
RESIDENT = Way("resident", mapped=True, budget=ALL_RESIDENT)
SMALLEST = Way("smallest", mapped=True, budget=LEAST)
#: Masters in RAM that are cast, and so are streamed on the CPU too.
CAST = Way("cast", dtype=torch.float64)

# The pretend device is slow, so fewer ways are tested there. Masters in RAM are streamed on it.
WAYS = (SMALLEST,) if PRETEND else (DEFAULT, MAPPED, RESIDENT, SMALLEST)
TRAINING_WAYS = (DEFAULT, RESIDENT) if PRETEND else (*WAYS, CAST)


def beside_plain(
    provider: Provider,
    way: Way,
    folder: Path,
    make: Callable[[], Any],
    program: Callable[[Any], Any],
    part: Callable[[Any], nn.Module] = lambda made: made,
    *,
    moved: bool = False,
) -> Any:
    """Run a program on a plain model and on the same model installed; assert equal results, to the bit.

    Compares what the program returns, and the masters afterwards. If weights have to be moved, it also
    asserts that about all bytes of the model were.

    Parameters
    ----------
    provider, way
        How to install.
    folder
        Where the file is written from which masters are mapped.
    make
        Returns the program's argument: a model, or an object that holds one.
    program
        The program; its argument is what `make` returned.
    part
        Returns the model to install, given what `make` returned.
    moved
        Whether the plain model is moved to the device as a whole. If not, its masters stay, so that an
        optimizer steps on the same device in both runs.

    Returns
    -------
    Any
        What the program returned on the installed model.
    """
    seeded()
    plain = make()
    if moved:
        testing.move(part(plain), provider.device, way.dtype)
    elif provider.device.type != "cpu" or way.dtype is not None:
        moved_at_each_access(part(plain), provider.device, way.dtype)
    seeded()
    expected = program(plain)
    seeded()
    made = make()
    handle = install(provider, way, folder, part(made))
    seeded()
    actual = program(made)
    unequal = testing.differences(actual, expected, "result")
    unequal += testing.differences(masters(part(made)), masters(part(plain)), "masters")
    assert not unequal, f"{len(unequal)} differences: {'; '.join(unequal[:5])}"
    check_moved(provider, way, handle, part(made))
    return actual


def install(provider: Provider, way: Way, folder: Path, model: nn.Module) -> dynswap_ext.Handle:
    """Install a model in this way."""
    if way.mapped:
        testing.map_from_file(model, folder / f"masters{len(provider.handles)}.pt")
    options: dict[str, Any] = {} if way.dtype is None else {"dtype": way.dtype}
    if way.budget == ALL_RESIDENT:
        options["budget"] = 1 << 30
    elif way.budget == LEAST:
        options["budget"] = smallest_budget(provider, model, **options)
    return provider.install(model, **options)


def smallest_budget(provider: Provider, model: nn.Module, **options: Any) -> int | None:
    """Return the smallest budget that works, as the error names it; None if any does."""
    try:
        provider.install(model, budget=1, **options).uninstall()
    except dynswap_ext.BudgetError as error:
        return error.smallest_bytes
    return None


def check_moved(provider: Provider, way: Way, handle: dynswap_ext.Handle, model: nn.Module) -> None:
    """Assert that weights were moved if they have to be. Otherwise a comparison would prove nothing."""
    if not way.streams(provider):
        return
    stats, whole = handle.stats(), 0.9 * bytes_of(model)  # not all: some buffers are in no file
    assert stats.bytes_moved > whole
    if provider.native and way.budget == ALL_RESIDENT:
        assert stats.resident_bytes == stats.weight_bytes
    if provider.native and way.budget == LEAST:
        assert stats.bytes_moved > 2 * whole


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model, on the host."""
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def moved_at_each_access(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Make each read of a weight return a copy by `.to()`, through which gradients reach the master.

    This does in plain torch what an install does: the masters stay where they are.
    """
    dressed: dict[type, type] = {}
    others = dtypes_as_loaded(model, dtype)
    for module in model.modules():
        cls = type(module)
        if cls not in dressed:
            dressed[cls] = _dressed(cls, device, dtype, others)
        module.__class__ = dressed[cls]


def _dressed(
    cls: type,
    device: torch.device,
    dtype: torch.dtype | None,
    others: Mapping[tuple[nn.Module, str], torch.dtype],
) -> type:
    def fetch(self: Any, name: str) -> Any:
        value = cls.__getattr__(self, name)  # type: ignore[attr-defined]
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, others.get((self, name), dtype) if value.is_floating_point() else None)

    members: dict[str, Any] = {"__getattr__": fetch, "_apply": lambda self, *_, **__: self}
    if isinstance(getattr(cls, "device", None), property):
        members["device"] = property(lambda self: device)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**members, **names})
