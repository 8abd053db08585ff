"""The GPU of tests/cuda, the pretend one (tests/device) or a real one: models, streams, delays, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynswap_ext
import pretend_cuda

#: Wide enough for each layer to be copied by itself (a group); the bytes of a layer in float32.
WIDTH, LAYERS = 1152, 6
LAYER_BYTES = WIDTH * WIDTH * 4
_CYCLES_A_MILLISECOND = 2_000_000  # at the clock of the fastest devices; slower ones delay longer


class Exact(nn.Module):
    """Layers over small whole numbers, whose products are exact in whatever order they are summed.

    If a layer is computed with any wrong byte, its output changes, and with it all that follows.
    """

    def __init__(self, layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        for layer in self.layers:
            layer.weight.data = torch.randint(-1, 2, (width, width)).float()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.remainder(layer(x), 7.0)
        return x


class Gain(nn.Module):
    """A layer with a large weight and very little arithmetic, for tests of memory.

    The weight is smaller on the pretend device, which copies all of it on the host.
    """

    BYTES = (2 if pretend_cuda.active() else 16) << 20

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(self.BYTES // 4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def gains(layers: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Gain() for _ in range(layers))).requires_grad_(False)


#: For tests that count, to the byte, what a device's allocator has and asks for.
only_pretended_cuda = pytest.mark.skipif(
    not pretend_cuda.active() or pretend_cuda.device_type() != "cuda",
    reason="needs a CUDA device whose memory is capped: the pretend one",
)


#: The width and the bytes of a layer of `layers`. Weight and bias are both multiples of an alignment.
CAPPED_WIDTH = 256
CAPPED_LAYER = CAPPED_WIDTH * CAPPED_WIDTH * 4 + CAPPED_WIDTH * 4


def layers(count: int = 16, seed: int = 0) -> nn.Sequential:
    """Return layers whose bytes can be counted under a cap on memory."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(CAPPED_WIDTH, CAPPED_WIDTH) for _ in range(count))).requires_grad_(False)


def cap(size: int) -> None:
    """Let the process take exactly `size` more bytes of the pretend GPU than it has now."""
    pretend_cuda.faults().segment_bytes = 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)


@dataclass
class Peak:
    """The most device memory that a block used, in bytes, less what was in use before it."""

    bytes: int = 0


class Gpu:
    """A GPU and a provider to test with."""

    def __init__(self, provider: Any) -> None:
        self.provider = provider
        self._module: Any = provider.device_module
        self._ballast: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.provider.device

    @property
    def native(self) -> bool:
        return self.provider.native

    def install(self, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
        return self.provider.install(model, **options)

    def pair(
        self, model: nn.Module, dtype: torch.dtype | None = torch.float64, **options: Any
    ) -> tuple[nn.Module, dynswap_ext.Handle]:
        """Install the model; return a moved copy to compare it with, and the handle."""
        return self.provider.pair(model, dtype, **options)

    def whole_numbers(
        self, rows: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = WIDTH
    ) -> Tensor:
        """Return an input for `Exact`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 7, (rows, width), generator=generator).to(self.device, dtype)

    def pin(self, model: nn.Module) -> None:
        """Pin masters on devices other than CUDA, where an install cannot page-lock them in place."""
        if self.device.type != "cuda":
            for master in model.parameters():
                master.data = master.data.pin_memory()

    # Streams ------------------------------------------------------------------------------------------

    def new_stream(self) -> Any:
        return self._module.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._module.stream(stream)

    def follow(self, stream: Any) -> None:
        """Let the current stream wait for all that is queued on `stream`."""
        self._module.current_stream(self.device).wait_stream(stream)

    def wait_for_default(self, stream: Any) -> None:
        """Let `stream` wait for all that is queued on the default stream."""
        stream.wait_stream(self._module.default_stream(self.device))

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def record(self) -> Any:
        """Return an event recorded on the current stream."""
        event = self._module.Event()
        event.record(self._module.current_stream(self.device))
        return event

    def delay(self, milliseconds: float) -> None:
        """Let the current stream idle for a while, without a wait of the host."""
        self._module._sleep(int(milliseconds * _CYCLES_A_MILLISECOND))

    def congest(self) -> None:
        """Keep the bus busy, so that copies that are queued later arrive late."""
        if self._ballast is None:
            here = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
            self._ballast = here, torch.empty_like(here, device=self.device)
        here, there = self._ballast
        with self.on(self.new_stream()):
            for _ in range(16):
                there.copy_(here, non_blocking=True)

    def synchronise(self) -> None:
        self._module.synchronize(self.device)

    def done(self) -> None:
        """Wait for the current stream alone."""
        self._module.current_stream(self.device).synchronize()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Forbid synchronisations of the host, on the pretend device also those of the engine."""
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with pretend_cuda.no_synchronisation() if pretend_cuda.active() else nullcontext():
                yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    # Memory -------------------------------------------------------------------------------------------

    def allocated(self) -> int:
        return self._module.memory_allocated(self.device)

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measure the most device memory that the block uses."""
        self.synchronise()
        self._module.reset_peak_memory_stats(self.device)
        before, found = self.allocated(), Peak()
        yield found
        self.synchronise()
        found.bytes = self._module.max_memory_allocated(self.device) - before

    @contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        """Let torch's allocator take `size` more bytes, and refuse more.

        cuBLAS takes its workspace for the current stream (32 MiB on recent devices) before that.
        """
        for dtype in (torch.float32, torch.float64):
            torch.mm(*(torch.ones(8, 8, dtype=dtype, device=self.device) for _ in range(2)))
        self.synchronise()
        gc.collect()  # what earlier tests have left would make room later
        self._module.empty_cache()
        total = self._module.mem_get_info(self.device)[1]
        share = (self._module.memory_reserved(self.device) + size) / total
        self._module.set_per_process_memory_fraction(share, self.device)
        try:
            yield
        finally:
            self.uncap()

    def uncap(self) -> None:
        self._module.set_per_process_memory_fraction(1.0, self.device)
