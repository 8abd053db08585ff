"""Accelerators for a CPU-only torch: the GPU of the tests.

`activate()` has to be called before torch is imported. DYNSWAP_TEST_DEVICE names the kind of device:

- "pretend" (or nothing): devices of type "cuda", and a CUDA runtime for `dynswap_ext._C`.
- "no-toolkit": the same devices as they are without a CUDA toolkit. `dynswap_ext._C` has no CUDA backend.
- "privateuse1": devices of the type "pretend", which are registered as those of other accelerators are.

From then on ``torch.cuda``, or ``torch.pretend``, runs on the machine in ``tests/device``, which is crueller
than a GPU (Note [Crueller than a GPU] in machine.h).
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _build
from ._build import Unavailable

__all__ = [
    "Unavailable",
    "activate",
    "active",
    "counts",
    "device_type",
    "dropping_work",
    "faults",
    "has_toolkit",
    "last_error",
    "no_synchronisation",
    "protections",
    "register_collectives",
    "reset",
    "runtime",
    "violations",
    "virtual_clock",
    "watch_pages",
    "without",
]

_pretend: Any = None
_mutants: Path | None = None


def active() -> bool:
    """Return whether this process has the pretend device."""
    return _pretend is not None


def activate(mutants: bool = False) -> None:
    """Build the device if it is out of date, and put it under torch. Raises `Unavailable`.

    With `mutants`, the extension is the build from which `without` can take a protection.
    """
    global _pretend, _mutants
    if active():
        return
    if "torch" in sys.modules:
        raise Unavailable("torch has been imported before the pretend device was asked for")
    kind = _build.wanted()
    _build.build(kind, mutants)
    _pretend = _load("_pretend", str(kind.device))
    extension = _build.MUTANTS if mutants else kind.extension
    sys.meta_path.insert(0, _Finder(str(extension), cuda=kind.type == "CUDA"))
    _mutants = extension if mutants else None
    if kind.type == "PrivateUse1":
        from . import _torch_privateuse1

        _torch_privateuse1.prepare(_pretend)


def device_type() -> str:
    """Return the type of the devices: "cuda" or "pretend"."""
    return "cuda" if _build.wanted().type == "CUDA" else "pretend"


def register_collectives() -> str:
    """Register a backend of torch.distributed for tensors on the device, and return the backends of a group.

    They are what `init_process_group` takes: "cpu:gloo,cuda:pretend".
    """
    from torch import distributed

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _pretend.collectives(distributed.ProcessGroupGloo(store, rank, size, timeout=timeout))

    distributed.Backend.register_backend("pretend", make, devices=[device_type()])
    return f"cpu:gloo,{device_type()}:pretend"


def has_toolkit() -> bool:
    """Return whether the extension has its CUDA backend on this kind of device."""
    return _build.wanted().toolkit


def reset(seed: int = 1, order: str = "late") -> None:
    """Finish all queued work, and begin again without counts, violations and faults.

    `order` ("late", "early" or "mixed") and `seed` decide when queued work runs.
    """
    _pretend.reset(seed, order)


def runtime() -> ctypes.CDLL:
    """Return the library that has the CUDA runtime's functions."""
    return ctypes.CDLL(_pretend.__file__)


def counts() -> dict[str, int]:
    """Return what has happened since the last reset (struct Counts in machine.h)."""
    return _pretend.counts()


def violations() -> list[str]:
    """Return the mistakes since the last reset that no GPU forgives, and the error of queued work, if any."""
    error = _pretend.sticky_error()
    return [*_pretend.violations(), *([f"queued work failed: {error}"] if error else [])]


def last_error() -> int:
    """Return the runtime's last error in this thread, as cudaPeekAtLastError() does; 0 if there is none."""
    return _pretend.last_error()


def faults() -> Any:
    """Return the settings of what the driver cannot, or will not, do (struct Faults in machine.h)."""
    return _pretend.faults()


def watch_pages() -> None:
    """Report pages that are unmapped while they are registered as violations, until the next reset. Slow."""
    _pretend.watch_pages(True)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Make every synchronisation an error, those of torch and of the engine."""
    _pretend.forbid_synchronisation(True)
    try:
        yield
    finally:
        _pretend.forbid_synchronisation(False)


@contextmanager
def virtual_clock(bytes_per_second: float) -> Iterator[None]:
    """Let events tell the time of a device that copies at that speed (Note [The virtual clock] in machine.h).

    Operators take no time on that clock, except for ``torch.cuda._sleep()`` and similar ones.
    """
    _pretend.synchronize()
    _pretend.set_virtual_clock(bytes_per_second)
    try:
        yield
    finally:
        _pretend.synchronize()
        _pretend.set_virtual_clock(0)


@contextmanager
def dropping_work(under_way: int = 0) -> Iterator[None]:
    """Let the device do nothing, so that only the host takes time (Note [A machine that does nothing]).

    An event counts as over once `under_way` later ones have been recorded. Operators still take the host's
    time. Weights have to be pinned, because copies from other memory would wait for the device.
    """
    _pretend.synchronize()
    _pretend.drop_work(True, under_way)
    try:
        yield
    finally:
        _pretend.drop_work(False, 0)


def protections() -> list[str]:
    """Return the names of the protections that `without` can take away (csrc/core/protection.h)."""
    found = itertools.takewhile(bool, map(_switch().dynswap_protection, itertools.count(1)))
    return [name.decode() for name in found]


@contextmanager
def without(protection: str) -> Iterator[None]:
    """Take a protection away from the extension."""
    assert _switch().dynswap_without(protection.encode()), f"there is no protection {protection!r}"
    try:
        yield
    finally:
        _switch().dynswap_without(b"none")


def _switch() -> ctypes.CDLL:
    """Return the extension, which may not be loaded before torch, once it has been imported."""
    assert _mutants is not None, "the extension was not activated with mutants"
    assert "dynswap_ext._C" in sys.modules, "the extension has not been imported"
    switch = ctypes.CDLL(str(_mutants))
    switch.dynswap_protection.restype = ctypes.c_char_p
    switch.dynswap_without.restype = ctypes.c_bool
    return switch


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the pretend device's build of the extension. Prepares torch._C before torch.cuda is imported."""

    def __init__(self, extension: str, cuda: bool) -> None:
        self._extension, self._cuda = extension, cuda

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "dynswap_ext._C":
            return importlib.util.spec_from_file_location(fullname, self._extension)
        if fullname == "torch.cuda" and self._cuda:
            from . import _torch_cuda

            _torch_cuda.prepare(sys.modules["torch._C"], _pretend)
        return None
