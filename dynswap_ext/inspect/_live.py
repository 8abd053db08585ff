"""Measures of live memory: the storages that operations make, or what torch's CUDA allocator counts.

Note [What is measured on a CPU]
--------------------------------
The resident size of the process says little about a layer: the heap keeps freed pages and hands them out
again, and other threads, mapped checkpoints and the libraries' own pools are in it. What can be told exactly
is which tensors there are. Every operation passes the dispatcher, so a mode there sees each storage that one
makes; a weak reference to the storage tells when its last holder, be it Python, a view or an autograd graph,
lets it go. That is exact to the byte, the same on every run, and works on any device, the meta device too.
It does not see what an operation takes and gives back inside itself (scratch of a convolution), nor what is
allocated behind torch's back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynswap_ext.inspect._tensors import storages_of, tensors_in

__all__ = ["Meter", "meter_for"]


@contextmanager
def meter_for(device: torch.device) -> Iterator[Meter]:
    """Measure live bytes on a device while the block runs, counted from its beginning."""
    if device.type == "cuda":
        yield CudaMeter(device)
        return
    with LiveBytes(device) as live:
        yield live


class CudaMeter:
    """Measures what torch's caching allocator has given out on a GPU, to any thread. Resets its peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def current(self) -> int:
        """Bytes at this moment; below zero if more was freed than made."""
        return torch.cuda.memory_allocated(self._device) - self._base

    def take_peak(self) -> int:
        """The most since this was asked last."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._base
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of the live storages on a device that operations of this thread have made."""

    # Flex attention and its like are operations to this mode.
    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes: dict[int, int] = {}
        # Weak: a handed-out tensor's lease ends with its storage, and a measure must not hold it.
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._current = 0
        self._peak = 0

    @property
    def current(self) -> int:
        """Bytes at this moment."""
        return self._current

    def take_peak(self) -> int:
        """The most since this was asked last."""
        peak, self._peak = self._peak, self._current
        return peak

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and look at what it returns."""
        keywords = kwargs or {}
        output = func(*args, **keywords)
        # What an operation was given was there before, and so were weights that an install hands out.
        given = {
            storage._cdata
            for tensor in tensors_in((args, keywords))
            if tensor.device == self._device
            for storage in storages_of(tensor)
        }
        for tensor in tensors_in(output):
            if tensor.device == self._device:
                for storage in storages_of(tensor):
                    self._look(storage, new=storage._cdata not in given)
        return output

    def _look(self, storage: torch.UntypedStorage, *, new: bool) -> None:
        key = storage._cdata
        if key not in self._sizes:
            if not new:
                return
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._sizes[key] = 0
        size = storage.nbytes()  # may have changed, as `resize_` and `out=` do
        self._current += size - self._sizes[key]
        self._sizes[key] = size
        self._peak = max(self._peak, self._current)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self._current -= self._sizes.pop(key, 0)


Meter: TypeAlias = CudaMeter | LiveBytes
