"""Runs a model, and measures the compute of each module and the bandwidth of copies to the device."""

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

    #: The weights in the order of use, with the compute that was measured.
    weights: tuple[PlannedWeight, ...]
    #: The device on which the model ran.
    device: torch.device
    #: Bytes per second from the model's masters to the device.
    bandwidth: float
    #: Seconds to begin a copy; assumed, not measured.
    latency: float
    #: How the bandwidth was measured, in words.
    bandwidth_kind: str
    #: Seconds of compute of each timed pass, without its waits for copies.
    compute_seconds: tuple[float, ...]
    #: Assumptions that were made, one sentence each.
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
    """Install a model, run it, and time each module that has weights.

    The model need not fit the device. Time that a module waited for its weights is left out. What runs
    between two modules (attention, additions) counts as compute of the first. Afterwards the model is as it
    was.

    Parameters
    ----------
    model
        The model, which must not be installed. On the CPU, the bandwidth is that of the checkpoint file from
        which its masters are mapped; for an accelerator, it is that of copies from pinned memory.
    inputs
        One tensor, a sequence of arguments, or a mapping of keyword arguments. Tensors are moved to the
        device, and floating ones cast to `dtype`.
    device, dtype
        The options of `install`.
    budget
        The option of `install`, for the run that is measured. Default: half of the memory that is free.
    passes
        How many passes are timed. Their median counts.
    warm_up
        How many passes run before them.

    Raises
    ------
    ConfigError
        An option cannot be used, the model is installed already, or it has no weights.
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

    A hook before each module's call fetches the module's weights, and marks the time before and after that.
    The time between these marks is the wait for copies. The time from then to the hook of the next module is
    compute.
    """
    clock = DeviceClock(device)
    called: dict[int, None] = {}
    marks: list[tuple[int, Any, Any]] = []
    held: list[Any] = []  # weights that the hook has fetched, until the module accesses them itself

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
        first = marks[0][0] if marks else 0  # time before the first module counts as its compute
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
    """Return weights in the order in which their modules are called, with each module's compute.

    The last weight of a module gets its compute. A module that is not called follows the module that is
    registered before it.
    """
    order = list(called)
    for module in range(len(compute)):
        if module not in called:
            order.insert(order.index(module - 1) + 1 if module else 0, module)
    done: list[PlannedWeight] = []
    owed = 0.0  # compute of modules whose masters all belong to an earlier module
    for module in order:
        # Units of a module's fused experts have its number plus multiples of the number of modules.
        own = [weight for weight in weights if weight.unit % len(compute) == module]
        owed += compute[module]
        if own:
            done += [*own[:-1], replace(own[-1], seconds=owed)]
            owed = 0.0
    return (*done[:-1], replace(done[-1], seconds=done[-1].seconds + owed))
