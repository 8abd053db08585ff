"""Times the modules of a pass, each without what it waited for its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from dynswap_ext.demo.measure import timing_event
from dynswap_ext.planning.weights import own_names

__all__ = ["Clock", "Stopwatch", "clock_of"]


class Clock(Protocol):
    """Marks points of a device's time."""

    def mark(self) -> Any:
        """The point that the device's work has come to."""
        ...

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, once they are settled."""
        ...

    def settle(self) -> None:
        """Wait until the marks can be read."""
        ...


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        pass


class _EventClock:
    """Marks on the compute stream: no host synchronisation until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = timing_event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The clock of work on a device."""
    return _EventClock(device) if device.type == "cuda" else _HostClock()


class Stopwatch:
    """Hooks before each module that has weights; taken off at the end of the block, whatever happens.

    Such a hook asks for the module's weights, and marks the time before and after: what lies between is the
    wait for copies, and what lies between the second mark and the next module's first one is compute.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        #: Units in the order of their first call.
        self.order: dict[int, None] = {}
        self._modules = modules
        self._clock = clock_of(device)
        self._names = [own_names(module) for module in modules]
        self._marks: list[tuple[int, Any, Any]] = []
        self._runs: list[list[tuple[int, Any, Any]]] = []
        self._handles: list[Any] = []
        # Between the hook and the module's own access nobody else holds its weights.
        self._held: list[Any] = []

    def __enter__(self) -> Stopwatch:
        for unit, module in enumerate(self._modules):
            self._handles.append(module.register_forward_pre_hook(self._hook(unit), prepend=False))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._held.clear()

    def forget(self) -> None:
        """What was marked up to here was warm-up; the order of calls stays."""
        self._clock.settle()
        self._marks = []

    def begin(self) -> None:
        """A pass begins."""
        self._clock.settle()
        mark = self._clock.mark()
        self._marks = [(-1, mark, mark)]

    def end(self) -> None:
        """It is over."""
        mark = self._clock.mark()
        self._marks.append((-1, mark, mark))
        self._runs.append(self._marks)
        self._held.clear()

    def seconds(self) -> list[list[float]]:
        """Of each pass, the compute of each unit."""
        self._clock.settle()
        runs = []
        for marks in self._runs:
            run = [0.0] * len(self._modules)
            # What is before the first module counts as its compute.
            called = next((unit for unit, _, _ in marks if unit >= 0), 0)
            for (unit, _, begin), (_, end, _) in pairwise(marks):
                run[unit if unit >= 0 else called] += self._clock.between(begin, end)
            runs.append(run)
        return runs

    def _hook(self, unit: int) -> Callable[[nn.Module, Any], None]:
        def mark(module: nn.Module, _: Any) -> None:
            self.order.setdefault(unit)
            self._held.clear()
            before = self._clock.mark()
            self._held.extend(getattr(module, name) for name in self._names[unit])
            self._marks.append((unit, before, self._clock.mark()))

        return mark
