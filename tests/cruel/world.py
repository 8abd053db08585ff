"""The surroundings of a program of tests/cruel: a pretend device, an exact model, and comparisons.

A program installs a model and runs it. A plain copy on the host, its twin, gives the expected results.
Weights are small whole numbers, so a sum is the same in any order, and any wrong byte of a layer shows.
"""

from __future__ import annotations

import copy
import ctypes
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
import pretend_cuda
from dynswap_ext import testing

WIDTH, ROWS = 160, 4  # a weight is large enough for pages of its own: prepare()
LAYER_BYTES = WIDTH * WIDTH * 4  # in float32, as the masters are
ORDERS = ("late", "early", "mixed")


def whole_numbers(generator: torch.Generator, *shape: int) -> Tensor:
    """Return mostly zeros, else 1 and -1, so that gradients through many layers are exact in float32."""
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * (torch.randint(0, 10, shape, generator=generator) == 0)).float()


def prepare() -> None:
    """Let large masters have pages of their own (M_MMAP_THRESHOLD), so that they can be page-locked.

    Also sum on one thread, as the device does, and ignore warnings of programs that go over their budget.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", dynswap_ext.DynswapWarning)


class Layer(nn.Module):
    """A linear map. With buffers, it also adds what it saw last, and counts its calls."""

    seen: Tensor
    calls: Tensor

    def __init__(self, generator: torch.Generator, buffers: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_numbers(generator, WIDTH, WIDTH))
        self.buffers_too = buffers
        if buffers:
            self.register_buffer("seen", whole_numbers(generator, WIDTH))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.weight)
        if self.buffers_too:
            x = x + self.seen
            with torch.no_grad():
                self.seen.copy_(torch.remainder(x.detach().sum(0), 3.0))
                self.calls.add_(1)
        return torch.remainder(x, 5.0)


class Layers(nn.Module):
    def __init__(self, seed: int, count: int = 6, buffers: bool = False, tied: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(Layer(generator, buffers) for _ in range(count))
        if tied:
            self.layers[count - 2].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class World:
    """One run of one program."""

    seed: int
    order: str
    random: random.Random = field(init=False)
    made: int = 0  #: comparisons
    failed: list[str] = field(default_factory=list)
    streams: list[torch.cuda.Stream] = field(init=False)
    _handles: list[dynswap_ext.Handle] = field(default_factory=list)
    _later: list[Callable[[], None]] = field(default_factory=list)
    _inputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        pretend_cuda.reset(self.random.randrange(1 << 32), self.order)
        # If unpinning waits for all work, as in CUDA, hardly anything is queued when a plan ends.
        pretend_cuda.faults().unpinning_waits = self.seed % 2 == 0
        torch.cuda.set_device(0)
        torch.manual_seed(self.seed)
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    # Comparing ----------------------------------------------------------------------------------------

    def expect(self, holds: bool, what: str) -> None:
        self.made += 1
        if not holds:
            self.failed.append(what)

    def compare(self, actual: Any, expected: Any, what: str) -> None:
        self.made += 1
        self.failed += testing.differences(actual, expected, what)[:1]

    def compare_later(self, actual: Tensor, expected: Tensor, what: str, stream: torch.cuda.Stream) -> None:
        """Compare in `settle`, without a wait for what is still being computed."""

        def now() -> None:
            with torch.cuda.stream(stream):
                self.compare(actual.cpu(), expected, what)

        self._later.append(now)

    def settle(self) -> None:
        """Wait for the streams, and make the comparisons that were put off."""
        for stream in self.streams:
            stream.synchronize()
        while self._later:
            self._later.pop(0)()
        self._inputs.clear()

    # Doing --------------------------------------------------------------------------------------------

    def install(self, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
        handle = dynswap_ext.install(model, device="cuda:0", provider="native", **options)
        self._handles.append(handle)
        return handle

    def model(self, count: int = 6, **options: Any) -> tuple[Layers, Layers]:
        """Return a model, and its twin that is never installed."""
        model = Layers(self.random.randrange(1 << 32), count, **options)
        return model, copy.deepcopy(model)

    def numbers(self, dtype: torch.dtype | None, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        """Return an input on the device, which any stream may read, and the same on the host."""
        host = torch.tensor([[self.random.randrange(5) for _ in range(WIDTH)] for _ in range(rows)])
        host = host.to(dtype or torch.float32)
        there = host.to("cuda:0")
        torch.cuda.current_stream().synchronize()
        self._inputs.append(there)  # kept until no stream reads it
        return there, host

    def fill(self, layers: int = 3, size: int = LAYER_BYTES) -> None:
        """Take memory of the device, write on it, and free it: values in memory freed too early are lost."""
        kept = [torch.full((size,), 249, dtype=torch.uint8, device="cuda:0") for _ in range(layers)]
        kept.clear()

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Count an error in the block as a comparison that failed."""
        self.made += 1
        try:
            yield
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Uninstall, and check what no program may leave behind."""
        with self.step("the end"):
            self.settle()
        for handle in self._handles:
            with self.step("uninstall"):
                handle.uninstall()
            with self.step("what is held"):
                testing.assert_nothing_held(handle)
        torch.cuda.synchronize()
        self.expect(not pretend_cuda.violations(), "; ".join(pretend_cuda.violations()[:2]))


def expected_of(twin: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the twin's output in that dtype. Buffers that its forward writes are written in the twin."""
    moved = testing.moved(twin, "cpu", dtype)
    with torch.no_grad():
        result = moved(x)
        for buffer, written in zip(twin.buffers(), moved.buffers(), strict=True):
            buffer.copy_(written)
    return result


def run(program: Callable[[World], None], seed: int, order: str) -> World:
    """Run a program once; its first error ends it."""
    world = World(seed, order)
    with world.step("the program"):
        program(world)
    world.finish()
    return world
