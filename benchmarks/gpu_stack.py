"""A stack of equal layers with a chosen ratio of compute to copy, against max(compute, bytes / bandwidth).

Masters are in RAM. One run measures, with the same weights and input: the bandwidth of copies from pinned
memory, the resident model, dynswap with three budgets (three layers, a quarter of the model, and "auto" with
room for little more than half), the classic hook, and accelerate's cpu_offload. While dynswap's passes are
timed, `torch.cuda.set_sync_debug_mode("error")` turns a host synchronisation into an exception.

On the CPU (`--device cpu`, which proves that the script works) weights are cast, so that they are streamed.
"""

from __future__ import annotations

import copy
import gc
import importlib
import os
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

_DTYPE = torch.bfloat16
_SCRATCH = 16 << 20


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
    """What all baselines of one ratio have in common."""

    name: str
    device: torch.device
    dtype: torch.dtype
    passes: int
    input: Tensor
    layer_bytes: int  # on the device
    layers: int
    bandwidth: float
    scratch: int  # bytes beside the budget, of casts


@dataclass(frozen=True)
class Timing:
    seconds: list[float]
    peak_bytes: int  # allocated on the device
    output: Tensor  #: in RAM: on the device it would be in the next peak

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_passes(model: nn.Module, setting: Setting, *, warm_up: int = 3, silent: bool = False) -> Timing:
    """Time passes by events on the stream. `silent` forbids host synchronisations meanwhile."""
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
            return Timing(seconds, 0, output.cpu())
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
        return Timing(seconds, torch.cuda.max_memory_allocated(), output.cpu())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tokens_for(
    ratio: float, width: int, device: torch.device, dtype: torch.dtype, copy_seconds: float, most: int
) -> int:
    """Return the rows of an input for which a layer's compute takes `ratio` times as long as its copy.

    There are at most `most` rows.
    """
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

    rows = min(4096, most)
    for _ in range(3):  # the rate depends on the size
        rows = min(most, max(128, round(rows * ratio * copy_seconds / seconds(rows) / 128) * 128))
    return rows


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--ratio", type=float, nargs="+", default=[1.0], help="compute:copy of a layer")
    options.add_argument("--width", type=int, default=8192)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--passes", type=int, default=10)
    options.add_argument(
        "--cast",
        action="store_true",
        help="the last ratio once more with masters in float32, so that twice the bytes travel",
    )
    options.add_argument("--ours", action="store_true", help="the resident model and dynswap alone")
    given = options.parse_args()
    if given.tiny:
        given.width, given.layers, given.passes = 1024, 8, 2
    device = torch.device(given.device)
    bandwidth = pinned_bandwidth(device) if device.type == "cuda" else float("inf")
    record = Record("gpu_stack", given.tiny)
    record.figures["pinned_bytes_per_second"] = bandwidth
    cases = [(ratio, False) for ratio in given.ratio]
    if given.cast:
        cases.append((given.ratio[-1], True))
    for ratio, cast in cases:
        torch.manual_seed(0)
        stored = torch.float32 if cast or device.type == "cpu" else _DTYPE
        model = stack(given.width, given.layers, stored, device)
        layer_bytes = given.width * given.width * _DTYPE.itemsize
        moved_of_layer = given.width * given.width * min(stored.itemsize, _DTYPE.itemsize)
        most = 128 if given.tiny else 1 << 20  # a tiny run only shows that the script works
        rows = tokens_for(ratio, given.width, device, _DTYPE, moved_of_layer / bandwidth, most)
        setting = Setting(
            name=f"{ratio:g}{', cast' if cast else ''}",
            device=device,
            dtype=_DTYPE,
            passes=max(2, round(given.passes / max(1.0, ratio))),
            input=torch.randn(rows, given.width).to(device, _DTYPE),
            layer_bytes=layer_bytes,
            layers=given.layers,
            bandwidth=bandwidth,
            scratch=_SCRATCH if cast else 0,
        )
        record.figures[setting.name] = {
            "rows": rows,
            "layer_bytes": layer_bytes,
            "layers": given.layers,
            "stored": str(stored),
            "dtype": str(_DTYPE),
        }
        resident = measure_resident(model, setting, record)
        measure_installed(model, setting, resident, record, native_available(given.device))
        record.write(given.output)
        if not given.ours and not cast:
            measure_classic(model, setting, resident, record)
            record.write(given.output)
            measure_accelerate(model, setting, resident, record)
            record.write(given.output)
        del model
    return record.finish(given.output)


def stack(width: int, layers: int, dtype: torch.dtype, device: torch.device) -> Stack:
    """Return a stack in RAM. Its values are drawn on the device, which is much faster."""
    with torch.device("meta"):
        model = Stack(width, layers, dtype)
    for layer in model.layers:
        drawn = torch.empty(width, width, dtype=dtype, device=device).normal_(std=width**-0.5)
        layer.weight = nn.Parameter(drawn.cpu(), requires_grad=False)
    return model


def measure_resident(model: Stack, setting: Setting, record: Record) -> Timing:
    on_device = copy.deepcopy(model).to(setting.device, setting.dtype)
    timing = run_passes(on_device, setting)
    note(record, f"{setting.name}: resident", timing)
    return timing


def measure_installed(model: Stack, setting: Setting, resident: Timing, record: Record, native: bool) -> None:
    weights = setting.layer_bytes * setting.layers
    activations = max(0, resident.peak_bytes - weights)
    ring = 3 * setting.layer_bytes
    cuda = native and setting.device.type == "cuda"
    budgets: dict[str, int | str] = {"ring of 3": ring, "1/4": max(weights // 4, ring)}
    if cuda and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ:  # set for memcheck; "auto" is refused
        budgets["auto, room for half"] = "auto"
    for label, budget in budgets.items():
        # Besides the output of each pass, there is room for the guess of activations in the first call.
        room = weights // 2 + 2 * activations + setting.scratch
        begun = time.perf_counter()
        with (
            room_for(room, setting) if budget == "auto" else nullcontext(),
            dynswap_ext.install(
                model, device=setting.device, dtype=setting.dtype, budget=budget, prefetch=2
            ) as handle,
        ):
            install_seconds = time.perf_counter() - begun
            run_passes(model, setting, warm_up=2 if budget == "auto" else 1)
            handle.reset_stats()
            before = handle.stats()
            timing = run_passes(model, setting, warm_up=0, silent=native)
            after = handle.stats()
        moved = (after.bytes_moved - before.bytes_moved) / setting.passes
        limit = max(resident.median, moved / setting.bandwidth)
        name = f"{setting.name}: dynswap, budget {label}"
        note(
            record,
            name,
            timing,
            stats=after.__dict__,
            limit_seconds=limit,
            budget=budget,
            moved_bytes=moved,
            install_seconds=install_seconds,
        )
        record.bar(f"{name}: time / limit", timing.median / limit, at_most=1.05 if cuda else None)
        equal = torch.equal(timing.output, resident.output)
        record.bar(f"{name}: output equal to the resident model's, to the bit", equal, at_least=1)
        record.bar(f"{name}: bytes moved a pass / bytes of the model", moved / weights)
        if not cuda:
            continue
        if isinstance(budget, int):
            record.bar(
                f"{name}: peak allocated / (budget + activations)",
                timing.peak_bytes / (budget + activations + setting.scratch),
                at_most=1.0,
            )
        synchronisations = after.host_synchronisations - before.host_synchronisations
        record.bar(f"{name}: host synchronisations", synchronisations, at_most=0)


@contextmanager
def room_for(size: int, setting: Setting) -> Iterator[None]:
    """Let torch's allocator take `size` more bytes while the block runs, and refuse more."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def measure_classic(model: Stack, setting: Setting, resident: Timing, record: Record) -> None:
    install_hook(model, device=setting.device, dtype=setting.dtype)
    try:
        timing = run_passes(model, setting, warm_up=1)
    finally:
        uninstall_hook(model)
    note(record, f"{setting.name}: classic hook", timing)
    record.bar(f"{setting.name}: classic hook: time / resident", timing.median / resident.median)


def measure_accelerate(model: Stack, setting: Setting, resident: Timing, record: Record) -> None:
    try:
        accelerate: Any = importlib.import_module("accelerate")
        hooks: Any = importlib.import_module("accelerate.hooks")
    except ImportError as error:
        record.figures["accelerate cpu_offload"] = f"not measured: {error}"
        print(f"accelerate cpu_offload: not measured: {error}")
        return
    offloaded = copy.deepcopy(model).to(setting.dtype)  # accelerate does not cast while it copies
    accelerate.cpu_offload(offloaded, execution_device=setting.device)
    try:
        timing = run_passes(offloaded, setting, warm_up=1)
    finally:
        hooks.remove_hook_from_submodules(offloaded)
    note(record, f"{setting.name}: accelerate cpu_offload", timing)
    record.bar(f"{setting.name}: accelerate cpu_offload: time / resident", timing.median / resident.median)


def note(record: Record, name: str, timing: Timing, **more: Any) -> None:
    record.figures[name] = {"seconds": timing.seconds, "peak_bytes": timing.peak_bytes, **more}
    milliseconds = timing.median * 1e3
    print(f"{name:<28} {milliseconds:9.2f} ms a pass, peak allocated {timing.peak_bytes:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
