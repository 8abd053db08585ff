"""Runs a model here, and measures its compute module by module and how fast its weights come."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dynswap_ext import config
from dynswap_ext.errors import ConfigError
from dynswap_ext.install import install, is_installed
from dynswap_ext.planning.rates import files_of, latency_of, masters_bandwidth
from dynswap_ext.planning.stopwatch import Stopwatch
from dynswap_ext.planning.weights import Weight, outline_of_model, owners

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """A model that has run here."""

    #: In the order of use, with the compute that was measured.
    weights: tuple[Weight, ...]
    device: torch.device
    #: Bytes a second from its masters to the device, seconds to begin a copy, and how that was measured.
    bandwidth: float
    latency: float
    bandwidth_kind: str
    #: Of each timed pass, without what it waited for copies.
    compute_seconds: tuple[float, ...]
    notes: tuple[str, ...]


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    budget: int | float | str = 0.5,
    passes: int = 3,
    warm_up: int = 2,
) -> Measured:
    """Run a model, installed, and time each module that has weights.

    The model need not fit the device. Time that a module waited for its weights is left out. What runs
    between two modules (attention, additions) counts as compute of the first. Afterwards the model is as it
    was.

    Parameters
    ----------
    model
        Not installed. Its masters are where they will be when it is installed: the bandwidth is that of
        pinned copies for an accelerator, and on the CPU that of the checkpoint file they are mapped from.
    inputs
        One tensor, a sequence of arguments, or a mapping of keyword arguments; moved to the device, and
        floating tensors cast to `dtype`.
    device, dtype, budget
        As for `install`. The budget is that of the measuring run; default: half of the memory that is free.
    passes, warm_up
        Passes that are timed, whose median counts, and passes before them.

    Raises
    ------
    ConfigError
        An option cannot be used, or the model is installed already, or has no weights.
    BudgetError
        The device cannot hold the largest group of weights.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if any(is_installed(module) for module in model.modules()):
        raise ConfigError("the model is installed; uninstall it, and measure it then")
    if passes < 1 or warm_up < 1:
        raise ConfigError(f"passes is {passes} and warm_up {warm_up}; expected 1 or more of each")
    where = config.resolve(device=device, dtype=dtype).device
    outline = outline_of_model(model, dtype=dtype, disk=where.type == "cpu")
    if not outline.weights:
        raise ConfigError(f"the model, a {type(model).__name__}, has no weights to plan for")
    files = files_of(model)
    modules = owners(model)
    arguments, keywords = _arguments(inputs, where, dtype)
    with (
        torch.inference_mode(),
        install(model, device=where, dtype=dtype, budget=budget),
        Stopwatch(modules, where) as watch,
    ):
        for _ in range(warm_up):
            model(*arguments, **keywords)
        watch.forget()
        for _ in range(passes):
            watch.begin()
            model(*arguments, **keywords)
            watch.end()
        runs = watch.seconds()
    bandwidth, kind, notes = masters_bandwidth(where, files)
    compute = [statistics.median(run[unit] for run in runs) for unit in range(len(modules))]
    uncalled = [unit for unit in range(len(modules)) if unit not in watch.order]
    if uncalled:
        notes = (
            *notes,
            f"{len(uncalled)} of {len(modules)} modules with weights were not called by themselves in a "
            f"pass; "
            "their weights are planned for all the same, where the model registers them.",
        )
    return Measured(
        weights=_in_order(outline.weights, _order(watch.order, len(modules)), compute),
        device=where,
        bandwidth=bandwidth,
        latency=latency_of(where),
        bandwidth_kind=kind,
        compute_seconds=tuple(sum(run) for run in runs),
        notes=notes,
    )


def _order(called: dict[int, None], count: int) -> list[int]:
    """Units by their first call; one never called stays behind the one registered before it."""
    order = list(called)
    place = {unit: (position, 0) for position, unit in enumerate(order)}
    last, behind = (-1, 0), 0
    for unit in range(count):
        if unit in place:
            last, behind = place[unit], 0
        else:
            behind += 1
            place[unit] = (last[0], behind)
    return sorted(range(count), key=place.__getitem__)


def _in_order(
    weights: Sequence[Weight], order: Sequence[int], compute: Sequence[float]
) -> tuple[Weight, ...]:
    """Weights in that order of their units, a unit's compute with its last weight."""
    units: dict[int, list[Weight]] = {}
    for weight in weights:
        units.setdefault(weight.unit, []).append(weight)
    done: list[Weight] = []
    owed = 0.0  # of units whose masters all belong to an earlier one
    for unit in order:
        owed += compute[unit]
        if unit in units:
            *others, last = units[unit]
            done += [*others, replace(last, seconds=owed)]
            owed = 0.0
    done[-1] = replace(done[-1], seconds=done[-1].seconds + owed)
    return tuple(done)


def _arguments(
    inputs: Any, device: torch.device, dtype: torch.dtype | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), {name: _moved(value, device, dtype) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return tuple(_moved(value, device, dtype) for value in inputs), {}
    return (_moved(inputs, device, dtype),), {}


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device, dtype) for item in value)
    if type(value) is dict:
        return {name: _moved(item, device, dtype) for name, item in value.items()}
    return value
