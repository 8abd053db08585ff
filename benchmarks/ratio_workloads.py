"""Small pieces of work whose cost `ratios.py` watches, and the plain ones that they are compared with.

Each is prepared once and warmed up. Then a gauge measures `times` repetitions, inside a forward if models do
the work there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import common  # noqa: F401  # the checkout that is to be measured
import dynswap_ext
from dynswap_ext import checkpoint
from dynswap_ext.demo.run import install_hook, uninstall_hook

#: Returns a block whose content is measured.
Gauge = Callable[[], AbstractContextManager[Any]]
#: Prepared work, which is repeated that many times under the gauge.
Work = Callable[[Gauge, int], None]

WIDTH, LAYERS, MODULES = 64, 50, 1000
F64 = torch.float64
FITS, TWO_THIRDS = "64MiB", LAYERS * WIDTH * (WIDTH + 1) * 4 * 2 // 3


@dataclass(frozen=True)
class Workload:
    """One piece of work.

    Attributes
    ----------
    name
        What is done.
    prepare
        Prepares the work, which can be done inside the block.
    against
        The name of the workload by whose time its own is divided; None: it is only a reference.
    times
        The number of repetitions in one measurement of time.
    parts
        The number of layers or modules by which a figure is divided.
    """

    name: str
    prepare: Callable[[], AbstractContextManager[Work]]
    against: str | None = None
    times: int = 2000
    parts: int = 1


def _reads(module: nn.Module) -> Work:
    def work(gauge: Gauge, times: int) -> None:
        with gauge():
            for _ in range(times):
                module.weight  # noqa: B018

    return work


class _Reader(nn.Module):
    """Reads a layer's weight inside a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, gauge: Gauge, times: int) -> None:
        _reads(self.layer)(gauge, times)


@contextmanager
def _installed(model: nn.Module, **options: Any) -> Iterator[nn.Module]:
    handle = dynswap_ext.install(model, device="cpu", **options)
    try:
        yield model
    finally:
        handle.uninstall()


def _read_inside(**options: Any) -> Callable[[], AbstractContextManager[Work]]:
    @contextmanager
    def prepare() -> Iterator[Work]:
        with _installed(_Reader(), **options) as model:
            yield model

    return prepare


def _read_outside(**options: Any) -> Callable[[], AbstractContextManager[Work]]:
    @contextmanager
    def prepare() -> Iterator[Work]:
        with _installed(nn.Linear(WIDTH, WIDTH), **options) as model:
            model(torch.zeros(1, WIDTH, dtype=options.get("dtype")))
            yield _reads(model)

    return prepare


@contextmanager
def _plain_read() -> Iterator[Work]:
    yield _reads(nn.Linear(WIDTH, WIDTH))


@contextmanager
def _classic_read() -> Iterator[Work]:
    model = nn.Linear(WIDTH, WIDTH)
    install_hook(model, device="cpu", dtype=F64)
    yield _reads(model)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).eval()


def _calls(model: nn.Module, dtype: torch.dtype) -> Work:
    x = torch.randn(1, WIDTH, dtype=dtype)

    def work(gauge: Gauge, times: int) -> None:
        with torch.no_grad(), gauge():
            for _ in range(times):
                model(x)

    return work


def _forward(
    dtype: torch.dtype = torch.float32, **options: Any
) -> Callable[[], AbstractContextManager[Work]]:
    @contextmanager
    def prepare() -> Iterator[Work]:
        if not options:
            yield _calls(_layers().to(dtype), dtype)
            return
        with _installed(_layers(), dtype=dtype, **options) as model:
            yield _calls(model, dtype)

    return prepare


def _forward_from_a_file(**options: Any) -> Callable[[], AbstractContextManager[Work]]:
    @contextmanager
    def prepare() -> Iterator[Work]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.pt"
            torch.save(_layers().state_dict(), path)
            with _installed(checkpoint.load(_layers(), path), **options) as model:
                yield _calls(model, torch.float32)

    return prepare


@contextmanager
def _install() -> Iterator[Work]:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(MODULES))

    def work(gauge: Gauge, times: int) -> None:
        for _ in range(times):
            with gauge():
                handle = dynswap_ext.install(model, device="cpu", dtype=F64)
            handle.uninstall()

    yield work


@contextmanager
def _classic_install() -> Iterator[Work]:
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(MODULES))

    def work(gauge: Gauge, times: int) -> None:
        for _ in range(times):
            with gauge():
                install_hook(model, device="cpu", dtype=F64)
            uninstall_hook(model)

    yield work


READ, READ_HOOK = "plain: read", "classic hook: read"
FORWARD, FORWARD_64 = "plain: forward of small layers", "plain: forward of small layers, float64"
INSTALL = "classic installer: install"

WORKLOADS = (
    Workload(READ, _plain_read),
    Workload(READ_HOOK, _classic_read),
    Workload(FORWARD, _forward(), times=4, parts=LAYERS),
    Workload(FORWARD_64, _forward(F64), times=4, parts=LAYERS),
    Workload(INSTALL, _classic_install, times=1, parts=MODULES),
    Workload("read in a forward, as it is", _read_inside(), READ),
    Workload("read in a forward, resident with a cast", _read_inside(dtype=F64, budget=FITS), READ),
    Workload("read in a forward, streamed", _read_inside(dtype=F64), READ, 500),
    Workload("read outside, as it is", _read_outside(), READ),
    Workload("read outside, resident with a cast", _read_outside(dtype=F64, budget=FITS), READ, 500),
    Workload("read outside, streamed", _read_outside(dtype=F64), READ, 500),
    Workload("forward, as it is", _forward(budget=FITS), FORWARD, 4, LAYERS),
    Workload("forward, resident with a cast", _forward(F64, budget=FITS), FORWARD_64, 4, LAYERS),
    Workload("forward, streamed", _forward(F64, budget="minimum"), FORWARD_64, 4, LAYERS),
    Workload("forward, resident from a file", _forward_from_a_file(budget=FITS), FORWARD, 4, LAYERS),
    Workload("forward, two thirds from a file", _forward_from_a_file(budget=TWO_THIRDS), FORWARD, 4, LAYERS),
    Workload("install", _install, INSTALL, 1, MODULES),
    Workload(
        "fallback: read of a copy in a forward", _read_inside(dtype=F64, provider="python"), READ_HOOK, 100
    ),
)


class _Experts(nn.Module):
    """Layers of which each call uses two of eight, in an order that repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8 * LAYERS // 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.experts), 8):
            for chosen in (first // 8 % 8, (3 * first // 8 + 1) % 8):
                x = self.experts[first + chosen](x)
        return x


def _moved(make: Callable[[], nn.Module], share: float) -> Callable[[], int]:
    """Return a function that counts the bytes of a pass with a budget of that share of the weights."""

    def count() -> int:
        model = make()
        whole = sum(p.numel() for p in model.parameters()) * F64.itemsize
        budget: Any = max(int(share * whole), 4 * WIDTH * (WIDTH + 1) * F64.itemsize)
        handle = dynswap_ext.install(model, device="cpu", dtype=F64, budget=budget)
        x = torch.zeros(1, WIDTH, dtype=F64)
        for _ in range(3):
            before = handle.stats().bytes_moved
            model(x)
        moved = handle.stats().bytes_moved - before
        handle.uninstall()
        return moved

    return count


#: Functions that count the bytes of a pass, by name.
MOVED = {
    f"{name}, a budget of {share:.0%}": _moved(make, share)
    for name, make in (("layers", _layers), ("experts", _Experts))
    for share in (0, 0.25, 0.5, 0.75)
}
