"""Gives CPU-only torch accelerators: the tests' own GPU.

`activate()` before torch is imported, for one kind of device, which DYNSWAP_TEST_DEVICE names:

- "pretend" (or nothing): devices of type "cuda", and a CUDA runtime for `dynswap_ext._C`.
- "no-toolkit": the same devices as they are without a CUDA toolkit. `dynswap_ext._C` has no CUDA backend.
- "privateuse1": devices of the type "pretend", as the makers of other accelerators register theirs.

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
    """Whether this process has the pretend device."""
    return _pretend is not None


def activate(mutants: bool = False) -> None:
    """Build the device if need be, and put it under torch. Raises `Unavailable`.

    With `mutants`, the extension is the one from which `without` can take a protection.
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
    """The type of the devices: "cuda" or "pretend"."""
    return "cuda" if _build.wanted().type == "CUDA" else "pretend"


def has_toolkit() -> bool:
    """Whether the extension has its CUDA backend on this kind of device."""
    return _build.wanted().toolkit


def reset(seed: int = 1, order: str = "late") -> None:
    """Finish all that is queued, then begin again: counts, violations, faults, and when queued work runs."""
    _pretend.reset(seed, order)


def runtime() -> ctypes.CDLL:
    """The CUDA runtime's functions, by their names."""
    return ctypes.CDLL(_pretend.__file__)


def counts() -> dict[str, int]:
    """What has happened since the last reset (struct Counts in machine.h)."""
    return _pretend.counts()


def violations() -> list[str]:
    """What no GPU forgives; and an error of queued work."""
    error = _pretend.sticky_error()
    return [*_pretend.violations(), *([f"queued work failed: {error}"] if error else [])]


def last_error() -> int:
    """The runtime's last error in this thread, as cudaPeekAtLastError() tells it; 0 if there is none."""
    return _pretend.last_error()


def faults() -> Any:
    """What the driver cannot, or will not, do (struct Faults in machine.h)."""
    return _pretend.faults()


def watch_pages() -> None:
    """Until the next reset, pages that were unmapped while they were registered are a violation. Slow."""
    _pretend.watch_pages(True)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let any synchronisation be an error, torch's and the engine's."""
    _pretend.forbid_synchronisation(True)
    try:
        yield
    finally:
        _pretend.forbid_synchronisation(False)


@contextmanager
def virtual_clock(bytes_per_second: float) -> Iterator[None]:
    """Let events tell the time of a device that copies at that speed (Note [The virtual clock] in machine.h).

    Its operators take no time, but for ``torch.cuda._sleep()`` and its like.
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
    time. Weights have to be pinned: what is staged would wait for the device.
    """
    _pretend.synchronize()
    _pretend.drop_work(True, under_way)
    try:
        yield
    finally:
        _pretend.drop_work(False, 0)


def protections() -> list[str]:
    """Those that `without` can take away (csrc/core/protection.h)."""
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
    """The extension itself, once it has been imported: it may not be loaded before torch."""
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
    """Serves the extension's twin; and prepares torch._C before torch.cuda looks at it."""

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
