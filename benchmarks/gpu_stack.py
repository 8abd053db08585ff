"""A stack of equal layers at a chosen compute:copy, against max(compute, bytes / bandwidth), on a GPU.

Masters are in RAM. The bandwidth of copies from pinned memory, the resident model, dynswap under two budgets
(a ring of three layers, a quarter of the model), the classic hook and accelerate's cpu_offload are measured
in this one run, on the same weights and input. While dynswap's passes are timed,
`torch.cuda.set_sync_debug_mode("error")` turns a host synchronisation into an exception.

On the CPU (`--device cpu`, which proves that the script works) weights are cast on the way, so that they
move.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import dynswap_ext
from common import Record, native_available, parser
from dynswap_ext._util.clock import timing_event
from dynswap_ext.demo.run import install_hook, uninstall_hook
from dynswap_ext.planning.rates import pinned_bandwidth


class Stack(nn.Module):
    def __init__(self, width: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Setting:
    """What stays the same for all baselines."""

    device: torch.device
    dtype: torch.dtype
    passes: int
    input: Tensor
    layer_bytes: int  # on the device
    layers: int
    bandwidth: float


@dataclass(frozen=True)
class Timing:
    seconds: list[float]
    peak_bytes: int  # allocated on the device
    output: Tensor

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_passes(model: nn.Module, setting: Setting, *, warm_up: int = 3, silent: bool = False) -> Timing:
    """Time passes by events on the stream; `silent` forbids host synchronisations meanwhile."""
    cuda = setting.device.type == "cuda"
    with torch.inference_mode():
        for _ in range(warm_up):
            output = model(setting.input)
        if not cuda:
            seconds = []
            for _ in range(setting.passes):
                start = time.perf_counter()
                output = model(setting.input)
                seconds.append(time.perf_counter() - start)
            return Timing(seconds, 0, output)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        marks = [timing_event() for _ in range(setting.passes + 1)]
        with no_synchronisation() if silent else nullcontext():
            marks[0].record()
            for mark in marks[1:]:
                output = model(setting.input)
                mark.record()
        torch.cuda.synchronize()
        seconds = [left.elapsed_time(right) / 1e3 for left, right in pairwise(marks)]
        return Timing(seconds, torch.cuda.max_memory_allocated(), output)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens_for(
    ratio: float, width: int, device: torch.device, dtype: torch.dtype, copy_seconds: float
) -> int:
    """Rows of an input for which a layer computes `ratio` times as long as its weights travel."""
    if device.type != "cuda":
        return 8
    layer = nn.Linear(width, width, bias=False, dtype=dtype, device=device)

    def seconds(rows: int) -> float:
        x = torch.randn(rows, width, dtype=dtype, device=device)
        times: list[float] = []
        with torch.inference_mode():
            for _ in range(12):
                begin, end = timing_event(), timing_event()
                begin.record()
                layer(x)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    rows = 4096
    for _ in range(3):  # the rate depends on the size
        rows = max(128, round(rows * ratio * copy_seconds / seconds(rows) / 128) * 128)
    return rows


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--ratio", type=float, default=1.0, help="compute:copy of a layer")
    options.add_argument("--width", type=int, default=8192)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--passes", type=int, default=10)
    options.add_argument(
        "--cast", action="store_true", help="masters are float32, so that twice the bytes travel"
    )
    options.add_argument("--ours", action="store_true", help="the resident model and dynswap alone")
    given = options.parse_args()
    if given.tiny:
        given.width, given.layers, given.passes = 1024, 8, 2
    device = torch.device(given.device)
    dtype = torch.bfloat16
    stored = torch.float32 if given.cast or device.type == "cpu" else dtype
    record = Record(f"gpu_stack_{given.ratio:g}{'_cast' if given.cast else ''}", given.tiny)
    native = native_available(given.device)

    torch.manual_seed(0)
    model = Stack(given.width, given.layers, stored)
    layer_bytes = given.width * given.width * dtype.itemsize
    bandwidth = pinned_bandwidth(device) if device.type == "cuda" else float("inf")
    moved_of_layer = given.width * given.width * min(stored.itemsize, dtype.itemsize)
    rows = tokens_for(given.ratio, given.width, device, dtype, moved_of_layer / bandwidth)
    setting = Setting(
        device=device,
        dtype=dtype,
        passes=given.passes,
        input=torch.randn(rows, given.width).to(device, dtype),
        layer_bytes=layer_bytes,
        layers=given.layers,
        bandwidth=bandwidth,
    )
    record.figures["setting"] = {
        "rows": rows,
        "layer_bytes": layer_bytes,
        "layers": given.layers,
        "pinned_bytes_per_second": bandwidth,
        "stored": str(stored),
        "dtype": str(dtype),
    }
    resident = measure_resident(model, setting, record)
    measure_installed(model, setting, resident, record, native)
    record.write(given.output)
    if not given.ours:
        measure_classic(model, setting, resident, record)
        record.write(given.output)
        measure_accelerate(model, setting, resident, record)
    return record.finish(given.output)


def measure_resident(model: Stack, setting: Setting, record: Record) -> Timing:
    on_device = copy.deepcopy(model).to(setting.device, setting.dtype)
    timing = run_passes(on_device, setting)
    note(record, "resident", timing)
    return timing


def measure_installed(model: Stack, setting: Setting, resident: Timing, record: Record, native: bool) -> None:
    weights = setting.layer_bytes * setting.layers
    activations = max(0, resident.peak_bytes - weights)
    ring = 3 * setting.layer_bytes
    for label, budget in {"ring of 3": ring, "1/4": max(weights // 4, ring)}.items():
        with dynswap_ext.install(
            model, device=setting.device, dtype=setting.dtype, budget=budget, prefetch=2
        ) as handle:
            run_passes(model, setting, warm_up=1)
            handle.reset_stats()
            before = handle.stats()
            timing = run_passes(model, setting, warm_up=0, silent=native)
            after = handle.stats()
        moved = (after.bytes_moved - before.bytes_moved) / setting.passes
        limit = max(resident.median, moved / setting.bandwidth)
        name = f"dynswap, budget {label}"
        note(
            record, name, timing, stats=after.__dict__, limit_seconds=limit, budget=budget, moved_bytes=moved
        )
        cuda = native and setting.device.type == "cuda"
        record.bar(f"{name}: time / limit", timing.median / limit, at_most=1.05 if cuda else None)
        equal = torch.equal(timing.output, resident.output)
        record.bar(f"{name}: output equal to the resident model's, to the bit", equal, at_least=1)
        record.bar(f"{name}: bytes moved a pass / bytes of the model", moved / weights)
        if cuda:
            record.bar(
                f"{name}: peak allocated / (budget + activations)",
                timing.peak_bytes / (budget + activations),
                at_most=1.0,
            )
            synchronisations = after.host_synchronisations - before.host_synchronisations
            record.bar(f"{name}: host synchronisations", synchronisations, at_most=0)


def measure_classic(model: Stack, setting: Setting, resident: Timing, record: Record) -> None:
    install_hook(model, device=setting.device, dtype=setting.dtype)
    try:
        timing = run_passes(model, setting, warm_up=1)
    finally:
        uninstall_hook(model)
    note(record, "classic hook", timing)
    record.bar("classic hook: time / resident", timing.median / resident.median)


def measure_accelerate(model: Stack, setting: Setting, resident: Timing, record: Record) -> None:
    try:
        accelerate: Any = importlib.import_module("accelerate")
        hooks: Any = importlib.import_module("accelerate.hooks")
    except ImportError as error:
        record.figures["accelerate cpu_offload"] = f"not measured: {error}"
        print(f"accelerate cpu_offload: not measured: {error}")
        return
    offloaded = copy.deepcopy(model).to(setting.dtype)  # it does not cast on the way
    accelerate.cpu_offload(offloaded, execution_device=setting.device)
    try:
        timing = run_passes(offloaded, setting, warm_up=1)
    finally:
        hooks.remove_hook_from_submodules(offloaded)
    note(record, "accelerate cpu_offload", timing)
    record.bar("accelerate cpu_offload: time / resident", timing.median / resident.median)


def note(record: Record, name: str, timing: Timing, **more: Any) -> None:
    record.figures[name] = {"seconds": timing.seconds, "peak_bytes": timing.peak_bytes, **more}
    milliseconds = timing.median * 1e3
    print(f"{name:<28} {milliseconds:9.2f} ms a pass, peak allocated {timing.peak_bytes:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
