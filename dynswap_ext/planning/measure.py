"""Runs a model here, and measures its compute module by module and how fast its weights come."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dynswap_ext import config
from dynswap_ext._util.clock import DeviceClock
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._forward import arguments
from dynswap_ext.install import install, is_installed
from dynswap_ext.planning.rates import files_of, latency_of, masters_bandwidth
from dynswap_ext.planning.weights import PlannedWeight, outline_of_model, owners

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """A model that has run here."""

    #: In the order of use, with the compute that was measured.
    weights: tuple[PlannedWeight, ...]
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
    given, keywords = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(where, dtype if tensor.is_floating_point() else None),
        arguments(inputs, None, "inputs"),
    )
    with (
        torch.inference_mode(),
        install(model, device=where, dtype=dtype, budget=budget),
        _Stopwatch(modules, where) as watch,
    ):
        runs = [watch.time(lambda: model(*given, **keywords)) for _ in range(warm_up + passes)][warm_up:]
    bandwidth, kind, notes = masters_bandwidth(where, files)
    uncalled = len(modules) - len(watch.called)
    if uncalled:
        notes += (
            f"{uncalled} of {len(modules)} modules with weights were not called by themselves in a pass; "
            "their weights are planned for all the same, where the model registers them.",
        )
    compute = [statistics.median(seconds) for seconds in zip(*runs, strict=True)]
    return Measured(
        weights=_in_order(outline.weights, _order(watch.called, len(modules)), compute),
        device=where,
        bandwidth=bandwidth,
        latency=latency_of(where),
        bandwidth_kind=kind,
        compute_seconds=tuple(map(sum, runs)),
        notes=notes,
    )


class _Stopwatch:
    """Times modules by hooks before their calls; the hooks are removed at the end of the block.

    Such a hook asks for the module's weights, and marks the time before and after: what lies between is the
    wait for copies, and what lies between the second mark and the next module's first one is compute.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        #: Modules, by their number, in the order of their first call.
        self.called: dict[int, None] = {}
        self._modules = modules
        self._clock = DeviceClock(device)
        self._marks: list[tuple[int, Any, Any]] = []
        # Between the hook and the module's own access nothing else holds its weights.
        self._held: list[Any] = []
        self._hooks = ExitStack()

    def __enter__(self) -> _Stopwatch:
        for unit, module in enumerate(self._modules):
            self._hooks.callback(module.register_forward_pre_hook(self._hook(unit)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._held.clear()

    def time(self, call: Callable[[], object]) -> list[float]:
        """Run a pass; return the compute of each module."""
        self._clock.wait()
        begin = self._clock.mark()
        self._marks = [(-1, begin, begin)]
        call()
        end = self._clock.mark()
        self._marks.append((-1, end, end))
        self._held.clear()
        seconds = [0.0] * len(self._modules)
        # What runs before the first module counts as its compute.
        first = next((unit for unit, _, _ in self._marks if unit >= 0), 0)
        for (unit, _, begin), (_, end, _) in pairwise(self._marks):
            seconds[unit if unit >= 0 else first] += self._clock.seconds(begin, end)
        return seconds

    def _hook(self, unit: int) -> Callable[[nn.Module, Any], None]:
        names = [name for name, _, _ in own_masters(self._modules[unit])]

        def mark(module: nn.Module, _: Any) -> None:
            self.called.setdefault(unit)
            self._held.clear()
            before = self._clock.mark()
            self._held.extend(getattr(module, name) for name in names)
            self._marks.append((unit, before, self._clock.mark()))

        return mark


def _order(called: dict[int, None], count: int) -> list[int]:
    """Return units by their first call; one never called stays behind the one registered before it."""
    position = {unit: place for place, unit in enumerate(called)}
    keys, last = [], -1
    for unit in range(count):
        last = position.get(unit, last)
        keys.append((last, unit not in position, unit))
    return [unit for _, _, unit in sorted(keys)]


def _in_order(
    weights: Sequence[PlannedWeight], order: Sequence[int], compute: Sequence[float]
) -> tuple[PlannedWeight, ...]:
    """Return weights in that order of their units, a unit's compute with its last weight."""
    units: dict[int, list[PlannedWeight]] = {}
    for weight in weights:
        units.setdefault(weight.unit, []).append(weight)
    done: list[PlannedWeight] = []
    owed = 0.0  # of units whose masters all belong to an earlier one
    for unit in order:
        owed += compute[unit]
        if unit in units:
            *others, last = units[unit]
            done += [*others, replace(last, seconds=owed)]
            owed = 0.0
    done[-1] = replace(done[-1], seconds=done[-1].seconds + owed)
    return tuple(done)
