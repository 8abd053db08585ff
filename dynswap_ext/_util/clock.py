"""How long the work of a device takes."""

from __future__ import annotations

import time
from typing import Any

import torch


def timing_event(device: torch.device | None = None) -> torch.Event:
    """Return an event of the accelerator that ``elapsed_time()`` accepts."""
    return torch.Event(device, enable_timing=True)


class DeviceClock:
    """Marks points of a device's time: on an accelerator by events of the current stream, else by the clock.

    A mark costs no host synchronisation; reading the time between two marks waits for the later one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device

    def mark(self) -> Any:
        """Mark the point that the device's work has come to."""
        if self._device is None:
            return time.perf_counter()
        event = timing_event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks."""
        if self._device is None:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
