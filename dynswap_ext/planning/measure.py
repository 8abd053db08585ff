"""Runs a model here, and measures its compute module by module and how fast its weights come."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dynswap_ext import config
from dynswap_ext._util.clock import DeviceClock
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._inputs import arguments
from dynswap_ext.install import install, is_installed
from dynswap_ext.planning.rates import latency_of, masters_bandwidth
from dynswap_ext.planning.weights import PlannedWeight, outline_of_model, owners


@dataclass(frozen=True)
class Measured:
    """The result of `measure`: a model's compute, weight by weight, and the bandwidth of its copies."""

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


@check_option_names
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
    modules = owners(model)
    given, keywords = tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(where, dtype if tensor.is_floating_point() else None),
        arguments(inputs, None, "inputs"),
    )
    with torch.inference_mode(), install(model, device=where, dtype=dtype, budget=budget):
        runs, called = _timed(modules, where, lambda: model(*given, **keywords), warm_up + passes)
    bandwidth, kind, notes = masters_bandwidth(where, outline.files)
    uncalled = len(modules) - len(called)
    if uncalled:
        notes += (
            f"{uncalled} of {len(modules)} modules with weights were not called by themselves in a pass; "
            "their weights are planned for all the same, where the model registers them.",
        )
    compute = [statistics.median(seconds) for seconds in zip(*runs[warm_up:], strict=True)]
    return Measured(
        weights=_in_order(outline.weights, called, compute),
        device=where,
        bandwidth=bandwidth,
        latency=latency_of(where),
        bandwidth_kind=kind,
        compute_seconds=tuple(map(sum, runs[warm_up:])),
        notes=notes,
    )


def _timed(
    modules: Sequence[nn.Module], device: torch.device, call: Callable[[], object], passes: int
) -> tuple[list[list[float]], list[int]]:
    """Run passes. Return seconds of compute by pass and module, and module numbers in order of first call.

    A hook before a module's call asks for the module's weights, and marks the time before and after: what
    lies between is the wait for copies, and what lies between the second mark and the next module's first
    one is compute.
    """
    clock = DeviceClock(device)
    called: dict[int, None] = {}
    marks: list[tuple[int, Any, Any]] = []
    held: list[Any] = []  # between the hook and the module's own access nothing else holds its weights

    def mark(number: int, names: Sequence[str], module: nn.Module, _: Any) -> None:
        called.setdefault(number)
        held.clear()
        before = clock.mark()
        held.extend(getattr(module, name) for name in names)
        marks.append((number, before, clock.mark()))

    def run() -> list[float]:
        clock.wait()
        marks.clear()
        begin = clock.mark()
        call()
        end = clock.mark()
        held.clear()
        first = marks[0][0] if marks else 0  # what runs before the first module counts as its compute
        seconds = [0.0] * len(modules)
        for (number, _, begins), (_, ends, _) in pairwise([(first, begin, begin), *marks, (0, end, end)]):
            seconds[number] += clock.seconds(begins, ends)
        return seconds

    with ExitStack() as stack:
        stack.callback(held.clear)
        for number, module in enumerate(modules):
            names = [name for name, _, _ in own_masters(module)]
            stack.callback(module.register_forward_pre_hook(partial(mark, number, names)).remove)
        return [run() for _ in range(passes)], list(called)


def _in_order(
    weights: Sequence[PlannedWeight], called: Sequence[int], compute: Sequence[float]
) -> tuple[PlannedWeight, ...]:
    """Return weights in the order in which their modules are called, a module's compute with its last weight.

    A module that is not called stays behind the one that is registered before it.
    """
    order = list(called)
    for module in range(len(compute)):
        if module not in called:
            order.insert(order.index(module - 1) + 1 if module else 0, module)
    done: list[PlannedWeight] = []
    owed = 0.0  # of modules whose masters all belong to an earlier one
    for module in order:
        # The numbers of its fused experts are the module's, plus multiples of the number of modules.
        own = [weight for weight in weights if weight.unit % len(compute) == module]
        owed += compute[module]
        if own:
            done += [*own[:-1], replace(own[-1], seconds=owed)]
            owed = 0.0
    return (*done[:-1], replace(done[-1], seconds=done[-1].seconds + owed))
