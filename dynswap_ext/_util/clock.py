"""Measures how long the work of a device takes."""

from __future__ import annotations

import time
from typing import Any

import torch


def timing_event(device: torch.device | None = None) -> torch.Event:
    """Return an event of an accelerator that records its time, as ``elapsed_time()`` needs."""
    return torch.Event(device, enable_timing=True)


class DeviceClock:
    """Measures the time between two points of a device's work, which are called marks.

    On an accelerator a mark is an event on the current stream, so setting one does not synchronise the host.
    On the CPU it is a reading of the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device

    def mark(self) -> Any:
        """Return a mark at the end of the work that is queued on the current stream; on the CPU, of now."""
        if self._device is None:
            return time.perf_counter()
        event = timing_event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks. Waits until the device has reached the later one."""
        if self._device is None:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait until the device has done all work that it was given."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
