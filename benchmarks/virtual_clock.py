"""Time of a pass against max(compute, copy): the real engine on a virtual clock, so the figures are exact.

uniform   40 equal layers, compute:copy from 0.1 to 10, a ring of 3 layers, no residents.
shapes    Llama-3-8B, FLUX.1's transformer and SDXL's UNet (shapes.py) in bfloat16, on two machines, with
          budgets from the smallest that the engine accepts to 3/4 of the model. Once with residents spread
          evenly, as install(budget=<bytes>) has them, and once placed by time, as budget="auto" does.

The machines are assumptions, not measurements: a bus, a rate of arithmetic and a memory bandwidth. A weight's
kernel takes the longer of its operations at that rate and its bytes at that bandwidth.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import shapes
from common import Record, native_available, parser

_BYTES = 2  # an element of bfloat16
_LATENCY = 7e-6  # seconds to begin a copy


@dataclass(frozen=True)
class Machine:
    name: str
    bus: float  # bytes a second
    arithmetic: float  # operations a second
    memory: float  # bytes a second

    def workload(self, layers: list[shapes.Layer]) -> list[tuple[str, int, float, int]]:
        """Return the layers in the form that simulate() takes."""
        return [
            (
                layer.name,
                layer.elements * _BYTES,
                max(layer.operations / self.arithmetic, layer.elements * _BYTES / self.memory),
                layer.unit,
            )
            for layer in layers
        ]


MACHINES = (
    Machine("PCIe 4 card", bus=26.0e9, arithmetic=120e12, memory=0.9e12),
    Machine("PCIe 5 card", bus=55.6e9, arithmetic=500e12, memory=2.9e12),
)

MODELS = {
    "Llama-3-8B, 1 token": lambda: shapes.llama_3_8b(1),
    "Llama-3-8B, 2048 tokens": lambda: shapes.llama_3_8b(2048),
    "FLUX.1 transformer, 512 x 512": lambda: shapes.flux_1(1024),
    "FLUX.1 transformer, 1024 x 1024": lambda: shapes.flux_1(4096),
    "SDXL UNet, 1024 x 1024": lambda: shapes.sdxl_unet(128),
}

SHARES = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}


def simulate(
    weights: list[tuple[str, int, float, int]],
    budget: int,
    bus: float,
    passes: int,
    placement: str = "even",
    host: tuple[float, float] | None = None,
    mesh: tuple[int, float] | None = None,
) -> dict[str, Any]:
    from dynswap_ext import _C

    return _C.simulate(
        weights,
        budget=budget,
        prefetch=2,
        bandwidth=bus,
        latency=_LATENCY,
        passes=passes,
        placement=placement,
        host=host,
        mesh=mesh,
    )


def smallest_budget(weights: list[tuple[str, int, float, int]]) -> int:
    """Return the bytes that the engine needs for its largest group."""
    from dynswap_ext import _C

    return _C.smallest_budget(weights, backend="cuda")[0]


def uniform(record: Record, passes: int) -> None:
    layer_bytes, layers = 64 << 20, 40
    bus = 50e9
    worst = 0.0
    for ratio in (0.1, 0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 5.0, 10.0):
        seconds = ratio * layer_bytes / bus
        weights = [(f"layer{number}", layer_bytes, seconds, number) for number in range(layers)]
        result = simulate(weights, 3 * layer_bytes, bus, passes)
        record.figures[f"uniform, compute:copy {ratio:g}"] = result
        print(f"uniform, compute:copy {ratio:<5g} time / limit {result['ratio']:.4f}")
        worst = max(worst, result["ratio"])
    record.bar("uniform layers, compute:copy 0.1 to 10, ring of 3: worst", worst, at_most=1.03)


def real(record: Record, passes: int, models: list[str], machines: tuple[Machine, ...]) -> None:
    for name in models:
        layers = MODELS[name]()
        total = sum(layer.elements for layer in layers) * _BYTES
        worst = 0.0
        by_time: list[float] = []
        for machine in machines:
            weights = machine.workload(layers)
            budgets = {"smallest": smallest_budget(weights), "the ring of prefetch": 0}
            budgets |= {share: int(part * total) for share, part in SHARES.items()}
            for label, budget in budgets.items():
                if 0 < budget < budgets["smallest"]:
                    continue
                result = simulate(weights, budget, machine.bus, passes)
                record.figures[f"{name}, {machine.name}, {label}"] = {"budget": budget, **result}
                compute, copy = result["compute_seconds"], result["copy_seconds"]
                print(
                    f"{name:<32} {machine.name:<12} budget {label:<20} compute {compute * 1e3:8.1f} ms "
                    f"copy {copy * 1e3:8.1f} ms  time / limit {result['ratio']:.4f}"
                )
                worst = max(worst, result["ratio"])
                if label in SHARES:
                    timed = simulate(weights, budget, machine.bus, passes, "timed")
                    record.figures[f"{name}, {machine.name}, {label}, by time"] = {"budget": budget, **timed}
                    by_time.append(timed["seconds_per_pass"] / result["seconds_per_pass"])
        record.bar(f"{name}, residents by time / evenly spread: worst", max(by_time), at_most=1.001)
        record.bar(f"{name}, residents by time / evenly spread: best", min(by_time))
        record.bar(f"{name}, every budget and machine: worst", worst, at_most=1.08)


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--passes", type=int, default=6, help="the first half is warm-up (default: %(default)s)"
    )
    given = options.parse_args()
    record = Record("virtual_clock", given.tiny)
    if not native_available():
        return 0 if given.tiny else 2
    if given.tiny:
        uniform(record, 4)
        real(record, 4, ["Llama-3-8B, 1 token"], MACHINES[:1])
    else:
        uniform(record, given.passes)
        real(record, given.passes, list(MODELS), MACHINES)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
