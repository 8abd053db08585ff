"""The host's time for a streamed weight, and how much longer a pass takes because of it.

counts     What one pass asks of the device through each backend of the engine: copies, calls for them, bytes
           a transfer, kernels, host functions, synchronisations.
host time  Of a pass that only reads its weights: fetch, wait, issue of the copies, release. It runs over the
           tests' pretend device while that does nothing, so only our time and torch's dispatch are measured.
           The driver's own calls, and the work of a CUDA build of torch in its copy_(), are not included.
pass       The real engine on a virtual clock: Llama-3-8B, FLUX.1 and SDXL (shapes.py) at two bus speeds. Each
           streamed weight takes the host the time measured here before its copy can begin, each module's call
           10 us before its kernels can, and the host waits at the end of each pass.

Host time is CPU time of the thread, which others on the machine delay less than wall time; both are
recorded. Passes of all models alternate. "Ahead" is by how many events the host is ahead of the device: with
0 the device is always done, with 64 the host is far ahead of it.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from contextlib import ExitStack

import pretend_device

# isort: split

import torch
from torch import nn

import dynswap_ext
import pretend_cuda
import shapes
from common import Record, parser
from virtual_clock import MACHINES, Machine, simulate, smallest_budget

_BACKENDS = ("cuda", "torch")
_MOST = 6e-6  # seconds that a streamed weight may cost the host
_CALL = 10e-6  # seconds of the host for a module's call: assumed
_COUNTED = ("copies", "batches", "copied_bytes", "kernels", "host_functions", "synchronisations")
#: Number of weights, bytes of each, and how many fit into the budget. This decides how they are copied.
_LAYOUTS = {"alone": (64, 64 << 10, 3), "together": (64, 64 << 10, 16)}
_AHEAD = (0, 64)
_MODELS = {
    "Llama-3-8B, 1 token": lambda: shapes.llama_3_8b(1),
    "FLUX.1 transformer, 1024 x 1024": lambda: shapes.flux_1(4096),
    "SDXL UNet, 1024 x 1024": lambda: shapes.sdxl_unet(128),
}
#: Bus speeds in bytes per second, each with a GPU of its generation.
_BUSES = {25e9: MACHINES[0], 55e9: MACHINES[1]}


class Reader(nn.Module):
    """Reads its weight, and computes nothing."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements).pin_memory(), requires_grad=False)

    def forward(self) -> None:
        _ = self.weight


class Readers(nn.Module):
    def __init__(self, count: int, weight_bytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Reader(weight_bytes // 4) for _ in range(count))

    def forward(self) -> None:
        for layer in self.layers:
            layer()


def install_over(stack: ExitStack, backend: str, layout: str) -> tuple[nn.Module, dynswap_ext.Handle]:
    count, weight_bytes, fitting = _LAYOUTS[layout]
    model = Readers(count, weight_bytes)
    os.environ["DYNSWAP_ENGINE_BACKEND"] = backend
    options = {"device": "cuda", "budget": fitting * weight_bytes, "prefetch": 2, "provider": "native"}
    handle = stack.enter_context(dynswap_ext.install(model, **options))
    assert handle.backend == backend
    return model, handle


def count_calls(record: Record, layout: str) -> float:
    """Count what a pass asks of the device in the steady state. Return how many weights it copies."""
    passes = 4
    streamed = 0.0
    for backend in _BACKENDS:
        with ExitStack() as stack:
            model, handle = install_over(stack, backend, layout)
            for _ in range(3):
                model()
            torch.cuda.synchronize()
            before, counted = handle.stats(), pretend_cuda.counts()
            with pretend_cuda.no_synchronisation():
                for _ in range(passes):
                    model()
            after, now = handle.stats(), pretend_cuda.counts()
        found = {name: (now[name] - counted[name]) / passes for name in _COUNTED}
        found["transfers"] = (after.copies - before.copies) / passes
        found["bytes_a_transfer"] = found["copied_bytes"] / found["transfers"]
        # A batch is one call for all of its copies.
        alone = found["copies"] if not found["batches"] else found["transfers"] - found["batches"]
        found["calls_a_weight"] = (found["batches"] + alone) / found["copies"]
        waits = after.host_synchronisations - before.host_synchronisations
        found["host_synchronisations"] = waits / passes
        record.figures[f"{layout}, {backend}: a pass"] = found
        print(
            f"{layout:<9} {backend:<6} copies {found['copies']:5.1f}  transfers {found['transfers']:5.1f}  "
            f"bytes a transfer {found['bytes_a_transfer']:7.0f}  "
            f"calls a weight {found['calls_a_weight']:.2f}  "
            f"synchronisations {found['synchronisations'] + found['host_synchronisations']:.0f}"
        )
        if backend == "torch":
            total = found["synchronisations"] + found["host_synchronisations"]
            record.bar(f"{layout}, torch: host synchronisations a pass", total, at_most=0)
        streamed = found["copies"]
    return streamed


def time_passes(models: dict[str, nn.Module], passes: int) -> dict[str, dict[str, list[float]]]:
    """Return the CPU and wall seconds of passes. The models take turns."""
    taken: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in models}
    with torch.inference_mode():
        for model in models.values():
            for _ in range(20):
                model()
        gc.collect()
        gc.disable()
        try:
            for _ in range(passes):
                for name, model in models.items():
                    wall, cpu = time.perf_counter(), time.thread_time()
                    model()
                    cpu = time.thread_time() - cpu
                    taken[name]["wall"].append(time.perf_counter() - wall)
                    taken[name]["cpu"].append(cpu)
        finally:
            gc.enable()
    return taken


def time_host(record: Record, streamed: dict[str, float], passes: int) -> dict[str, float]:
    """Time passes. Return the seconds that each backend takes for a streamed weight, in the worst case."""
    most = dict.fromkeys(_BACKENDS, 0.0)
    for layout, (count, weight_bytes, _) in _LAYOUTS.items():
        for ahead in _AHEAD:
            with ExitStack() as stack:
                models: dict[str, nn.Module] = {"untouched": Readers(count, weight_bytes).cuda()}
                models |= {name: install_over(stack, name, layout)[0] for name in _BACKENDS}
                stack.enter_context(pretend_cuda.dropping_work(ahead))
                taken = time_passes(models, passes)
            name = f"{layout}, ahead {ahead}"
            plain = statistics.median(taken["untouched"]["cpu"]) / count
            for model, seconds in taken.items():
                each = {kind: [value / count for value in values] for kind, values in seconds.items()}
                cost = (statistics.median(each["cpu"]) - plain) * count / streamed[layout]
                added = {} if model == "untouched" else {"added": cost}
                record.figures[f"{name}, {model}: seconds a weight"] = {**each, **added}
                quarters = [value * 1e6 for value in statistics.quantiles(each["cpu"], n=4)]
                print(
                    f"{name:<20} {model:<10} {quarters[1]:6.2f} us a weight (half of all passes: "
                    f"{quarters[0]:.2f} to {quarters[2]:.2f}), {cost * 1e6:5.2f} more than untouched"
                )
                if model == "untouched":
                    continue
                most[model] = max(most[model], cost)
                bound = _MOST * 1e6 if model == "torch" else None
                record.bar(f"{name}, {model}: host time of a streamed weight, us", cost * 1e6, at_most=bound)
    return most


def slowdown(weights: list[tuple[str, int, float, int]], machine: Machine, host: float, passes: int) -> float:
    """Return the per cent by which the host's time for weights makes a pass longer, at the worst budget."""
    total = sum(nbytes for _, nbytes, _, _ in weights)
    slower = []
    for budget in (0, total // 8, total // 4, total // 2):
        if 0 < budget < smallest_budget(weights):
            continue
        free, taken = (
            simulate(weights, budget, machine.bus, passes, host=(seconds, _CALL))["seconds_per_pass"]
            for seconds in (0.0, host)
        )
        slower.append(round(100 * (taken / free - 1), 6) + 0.0)
    return max(slower)


def simulate_passes(record: Record, measured: dict[str, float], models: list[str], passes: int) -> None:
    hosts = {f"{backend}, as measured": seconds for backend, seconds in measured.items()}
    hosts |= {"6 us": _MOST, "20 us": 20e-6}
    for model in models:
        layers = _MODELS[model]()
        for bus, gpu in _BUSES.items():
            machine = Machine(gpu.name, bus, gpu.arithmetic, gpu.memory)
            weights = machine.workload(layers)
            for host, seconds in hosts.items():
                name = f"{model}, {bus / 1e9:g} GB/s, host time {host}: a pass is longer by, %"
                bound = None if host == "20 us" else 2.0
                record.bar(name, slowdown(weights, machine, seconds, passes), at_most=bound)


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--passes", type=int, default=2000, help="timed of each model (default: %(default)s)"
    )
    given = options.parse_args()
    if pretend_device.unavailable:
        print(f"left out, as there is no pretend device: {pretend_device.unavailable}")
        return 0 if given.tiny else 2
    record = Record("host_time", given.tiny)
    streamed = {layout: count_calls(record, layout) for layout in _LAYOUTS}
    measured = time_host(record, streamed, 5 if given.tiny else given.passes)
    models = list(_MODELS)[:1] if given.tiny else list(_MODELS)
    simulate_passes(record, measured, models, 4 if given.tiny else 6)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
