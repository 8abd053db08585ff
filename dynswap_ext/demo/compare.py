"""Runs the demo's model in each way, in a process of its own, and compares what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.text import Text

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.tables import facts_grid, plain_table, write
from dynswap_ext._util.units import (
    parse_dtype,
    parse_run_budget,
    parse_size,
    show_budget,
    show_seconds,
)
from dynswap_ext.config import resolve
from dynswap_ext.demo.model import cache_folder, checkpoint_file, coded_file, config_for
from dynswap_ext.demo.run import BASELINES, CODED, INSTALLED, RESIDENT, Job, Outcome, run_apart
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.rates import device_name, disk_bandwidth, pinned_bandwidth

#: The tokens of an input for which, on a usual machine, computing takes about as long as copying the weights.
_TOKENS_ON_CPU: Final = 256
_TOKENS_ON_ACCELERATORS: Final = 4096


@dataclass(frozen=True)
class DemoResult:
    """The measurements of one demo."""

    job: Job  #: of the installed model
    device: str
    model_bytes: int
    bandwidth: float  #: bytes per second: the higher of the readings before and after the installed run
    bandwidth_kind: str
    outcomes: dict[str, Outcome]  #: by the name of the baseline

    @property
    def differing(self) -> list[str]:
        """The names of baselines whose outputs differ from those of the resident model in any bit."""
        expected = self.outcomes[RESIDENT].digest
        return [name for name, outcome in self.outcomes.items() if outcome.digest != expected]

    @property
    def limit_seconds(self) -> float:
        """The least time of a pass of the installed model: max(fastest pass of any, bytes / bandwidth).

        If a pass of the installed model was faster than bytes / bandwidth, the bandwidth was measured too
        low, and the time of that pass takes the place of bytes / bandwidth.
        """
        installed = self.outcomes[INSTALLED]
        compute = min(min(outcome.seconds) for outcome in self.outcomes.values())
        moved = installed.moved_bytes_per_pass or 0.0
        return max(compute, min(moved / self.bandwidth, *installed.seconds))


def run_demo(options: argparse.Namespace) -> DemoResult:
    """Write the checkpoint, and run and measure every baseline, with the options of the command line."""
    device = resolve(device=options.device).device
    cpu = device.type == "cpu"
    dtype = parse_dtype(options.dtype) or (torch.float32 if cpu else torch.bfloat16)
    stored = parse_dtype(options.stored_dtype, "--stored-dtype") or dtype
    config = config_for(parse_size(options.size), stored)
    if options.passes < 1 or options.prefetch < 0 or (options.tokens is not None and options.tokens < 1):
        raise ConfigError("passes is at least 1, prefetch at least 0, tokens is at least 1")
    on_device = config.parameters * dtype.itemsize
    budget = parse_run_budget(options.budget, options.share, on_device, on_device // 4)

    folder = Path(options.folder) if options.folder else cache_folder()
    model_bytes = config.parameters * stored.itemsize
    print(f"preparing a checkpoint of {format_bytes(model_bytes)} in {folder} ...", flush=True)
    with (
        checkpoint_file(folder, config, stored, keep=options.keep, progress=True) as path,
        coded_file(path, keep=options.keep, progress=True) as coded,
    ):
        job = Job(
            baseline=INSTALLED,
            checkpoint=path,
            config=config,
            budget=budget,
            device=str(device),
            dtype=None if dtype == stored else dtype,
            tokens=options.tokens or (_TOKENS_ON_CPU if cpu else _TOKENS_ON_ACCELERATORS),
            passes=options.passes,
            prefetch=options.prefetch,
            in_memory=(options.source or ("file" if cpu else "ram")) == "ram",
        )
        bandwidth, kind = partial(disk_bandwidth, path), "sequential direct reads of the same file"
        if job.in_memory and not cpu:
            bandwidth, kind = partial(pinned_bandwidth, device), "copies from pinned memory"
        print("measuring the bandwidth of copies ...", flush=True)
        readings = [bandwidth()]
        outcomes: dict[str, Outcome] = {}
        for name in BASELINES:
            print(f"{name}: {job.warm_up + job.passes} passes ...", flush=True)
            file = coded if name == CODED else path
            outcomes[name] = run_apart(dataclasses.replace(job, baseline=name, checkpoint=file))
            if name == INSTALLED:
                readings.append(bandwidth())  # again, because disks of shared machines change their pace
    return DemoResult(job, device_name(device), model_bytes, max(readings), kind, outcomes)


def show(result: DemoResult) -> None:
    """Print the facts of a demo, the table of its measurements, and what follows from it."""
    job, config, outcomes = result.job, result.job.config, result.outcomes
    masters = "RAM" if job.in_memory else "mapped from the file"
    share = f" ({job.budget / result.model_bytes:.0%} of the file)" if isinstance(job.budget, int) else ""
    facts = {
        "model": f"decoder, {config.layers} layers of width {config.hidden}, "
        f"{config.parameters / 1e6:.0f} M parameters, {format_bytes(result.model_bytes)}; masters: {masters}",
        "device": result.device,
        "budget": f"{show_budget(job.budget)}{share}, prefetch {job.prefetch}",
        "bandwidth": f"{format_bytes(result.bandwidth)}/s ({result.bandwidth_kind}, measured in this run)",
    }
    where = "resident set" if result.device.startswith("cpu") else "allocated on the device"
    lines = [
        f"{CODED}: the file that `dynswap convert --lossless` writes. "
        "classic hook: a Python __getattr__ that calls .to() at each access. "
        "limit: max(fastest pass of any, bytes moved by dynswap / bandwidth). "
        f"Peak memory: {where}, above the start of the run."
    ]
    if not job.in_memory:
        lines.append(
            f"All but {RESIDENT} begin each pass with none of the file in the page cache, as on a machine "
            "whose memory it does not fit."
        )
    if outcomes[INSTALLED].provider != "native":
        lines.append("The native extension is not active; `dynswap info` says why.")
    if result.differing:
        lines.append(f"Outputs differ from the resident model's: {', '.join(result.differing)}")
    write(facts_grid(facts.items()), _table(result), *map(Text, lines))


def _table(result: DemoResult) -> Any:
    installed = result.outcomes[INSTALLED]
    ours = f"{INSTALLED}\n({installed.provider}, {installed.backend})"
    names = [ours if name == INSTALLED else name.replace(", ", ",\n") for name in result.outcomes]
    limit = result.limit_seconds
    rows: dict[str, Callable[[Outcome], str]] = {
        "time a pass": lambda o: show_seconds(statistics.median(o.seconds)),
        "  fastest": lambda o: show_seconds(min(o.seconds)),
        "  slowest": lambda o: show_seconds(max(o.seconds)),
        "  of the limit": lambda o: f"{statistics.median(o.seconds) / limit:.2f}x",
        "stalls a pass": lambda o: show_seconds(o.stall_seconds_per_pass),
        "peak memory": lambda o: format_bytes(o.peak_bytes),
        "moved a pass": lambda o: format_bytes(o.moved_bytes_per_pass),
        "from disk a pass": lambda o: format_bytes(o.disk_bytes_per_pass),
    }
    cells = [[title, *map(cell, result.outcomes.values()), ""] for title, cell in rows.items()]
    cells[0][-1] = show_seconds(limit)
    equal = ["differ" if name in result.differing else "bit-equal" for name in result.outcomes]
    cells.append(["outputs", "reference", *equal[1:], ""])
    return plain_table(["", *names, "limit"], cells, right=[*names, "limit"])
