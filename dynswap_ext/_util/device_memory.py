"""Memory of an accelerator: what its driver and torch's allocator report."""

from __future__ import annotations

from typing import Any, Final

import torch

from dynswap_ext.errors import ConfigError

#: Names of functions in `torch.accelerator`, and in the device's own module (`torch.xpu`) where that differs.
_OWN_NAMES: Final = {"get_memory_info": "mem_get_info"}
#: The field of a device's properties that is true of integrated GPUs, in torch.cuda and in torch.xpu.
_INTEGRATED: Final = ("is_integrated", "is_integrated_gpu")


class DeviceMemory:
    """The memory figures of an accelerator, in bytes.

    The figures come from `torch.accelerator`, which serves devices whose allocator derives from torch's own
    class. For other devices they come from the device's module, such as `torch.xpu`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: The device's module, such as `torch.xpu`.
        self._own = getattr(torch, device.type, None)

    def is_the_hosts(self) -> bool:
        """Return whether the device computes in the host's own memory, as integrated GPUs do.

        This asks the driver. False where torch does not tell, and for a device that can read the host's
        memory but has faster memory of its own (GH200).
        """
        if self._device.type == "mps":
            return True
        ask = getattr(self._own, "get_device_properties", None)
        try:
            properties = None if ask is None else ask(self._device)
        except (AssertionError, RuntimeError):  # there is no such device, or no driver
            return False
        return any(getattr(properties, name, False) for name in _INTEGRATED)

    def free(self) -> int:
        """Return the bytes that this process could still allocate.

        These are what the driver has free plus what torch's allocator holds unused. They are fewer if
        `torch.cuda.set_per_process_memory_fraction` limits the process to a part of the memory.
        """
        reserved = int(self._ask("memory_reserved"))
        return max(0, min(self.free_for_others(), self.total() - reserved)) + reserved - self.allocated()

    def free_for_others(self) -> int:
        """Return the bytes that the driver has free, which other processes could take."""
        return int(self._ask("get_memory_info")[0])

    def total(self) -> int:
        """Return the bytes of the device's memory, or of the fraction that this process may take of it."""
        total = int(self._ask("get_memory_info")[1])
        fraction = getattr(self._own, "get_per_process_memory_fraction", None)
        return total if fraction is None else int(fraction(self._device) * total)

    def empty_cache(self) -> None:
        """Make torch's allocator return its unused memory to the driver, for other processes."""
        empty = getattr(self._own, "empty_cache", None)  # the CPU has none
        if empty is not None:
            empty()

    def allocated(self) -> int:
        """Return the bytes that torch's allocator has given out."""
        return int(self._ask("memory_allocated"))

    def peak(self) -> int:
        """Return the most bytes that torch's allocator had given out at one time since `reset_peak`."""
        return int(self._ask("max_memory_allocated"))

    def reset_peak(self) -> None:
        """Begin a new measurement of `peak`, from what torch's allocator has given out now."""
        self._ask("reset_peak_memory_stats")

    def _ask(self, name: str) -> Any:
        try:
            return getattr(torch.accelerator, name)(self._device)
        except (AttributeError, RuntimeError, ValueError) as error:
            ask = getattr(self._own, _OWN_NAMES.get(name, name), None)
            if ask is None:
                raise ConfigError(
                    f"torch does not tell how much memory '{self._device}' has: {error}"
                ) from error
            return ask(self._device)
