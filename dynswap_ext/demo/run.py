"""The demo: one model run every way, each alone in a process, measured and compared."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dynswap_ext._util.units import parse_dtype, parse_share, parse_size
from dynswap_ext.config import resolve
from dynswap_ext.demo import baseline
from dynswap_ext.demo.baseline import BASELINES, INSTALLED, PYTHON, RESIDENT, Job, Outcome
from dynswap_ext.demo.files import Progress, cache_folder, checkpoint_file, ignore
from dynswap_ext.demo.isolated import Isolated, ProcessError
from dynswap_ext.demo.model import DecoderConfig, config_for
from dynswap_ext.errors import ConfigError
from dynswap_ext.planning.rates import device_name, disk_bandwidth, pinned_bandwidth

__all__ = ["DemoOptions", "DemoResult", "run_apart", "run_demo"]

#: An input that computes for about as long as the weights take to arrive, on the usual machine of its kind.
_TOKENS = {"cpu": 256, "cuda": 4096}


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line, as they are given there; None is chosen by device."""

    size: str = "1.5GB"
    budget: str | None = None
    prefetch: int = 2
    device: str | None = None
    dtype: str | None = None
    stored_dtype: str | None = None
    passes: int = 5
    tokens: int | None = None
    source: str | None = None
    folder: str | None = None
    keep: bool = False


@dataclass(frozen=True)
class DemoResult:
    """What was measured, for the table and for programs."""

    options: DemoOptions
    config: DecoderConfig
    device: str
    model_bytes: int
    budget: int
    in_memory: bool
    bandwidth: float  #: bytes a second: the best of the readings between the runs
    bandwidth_kind: str
    outcomes: dict[str, Outcome]
    differing: list[str]  #: baselines whose outputs were not those of the resident model, to the bit

    @property
    def limit_seconds(self) -> float:
        """max(fastest pass of any, bytes / bandwidth) of a pass of the installed model.

        A pass of the installed model that was faster shows that the bandwidth was read too low.
        """
        installed = self.outcomes[INSTALLED]
        compute = min(min(outcome.seconds) for outcome in self.outcomes.values())
        moved = installed.moved_bytes_per_pass or 0.0
        return max(compute, min(moved / self.bandwidth, *installed.seconds))

    def to_json(self) -> str:
        """Return everything, and the limit."""
        return json.dumps({**dataclasses.asdict(self), "limit_seconds": self.limit_seconds}, indent=2)


def run_demo(options: DemoOptions, progress: Progress = ignore) -> DemoResult:
    """Write the checkpoint, run every baseline, compare.

    Raises
    ------
    ConfigError
        An option is not understood.
    SourceError
        There is no room for the checkpoint.
    DynswapError
        A baseline failed; the message has what it wrote.
    """
    device = resolve(device=options.device).device
    if device.type not in _TOKENS:
        raise ConfigError(f"the demo measures on cpu and cuda, not on {device.type}")
    cpu = device.type == "cpu"
    dtype = parse_dtype(options.dtype) or (torch.float32 if cpu else torch.bfloat16)
    stored = parse_dtype(options.stored_dtype, "--stored-dtype") or dtype
    config = config_for(parse_size(options.size), stored)
    if options.source not in (None, "file", "ram"):
        raise ConfigError(f"source is 'file' or 'ram', not {options.source!r}")
    in_memory = (options.source or ("file" if cpu else "ram")) == "ram"
    if options.passes < 1 or options.prefetch < 0 or (options.tokens is not None and options.tokens < 1):
        raise ConfigError("passes is at least 1, prefetch at least 0, tokens is at least 1")
    budget = parse_share(options.budget or "1/4", config.parameters * dtype.itemsize)

    folder = Path(options.folder) if options.folder else cache_folder()
    with (
        checkpoint_file(folder, config, stored, progress, keep=options.keep) as path,
        tempfile.TemporaryDirectory() as scratch,
    ):
        bandwidth, kind = partial(disk_bandwidth, path), "sequential direct reads of the same file"
        if in_memory and not cpu:
            bandwidth, kind = partial(pinned_bandwidth, device), "copies from pinned memory"
        readings = [bandwidth()]
        outcomes: dict[str, Outcome] = {}
        files = {name: Path(scratch, f"{name}.pt") for name in BASELINES}
        for name in BASELINES:
            if name == PYTHON and outcomes[INSTALLED].provider == "python":
                continue
            job = Job(
                baseline=name,
                checkpoint=path,
                config=config,
                outputs=files[name],
                device=str(device),
                dtype=None if dtype == stored else dtype,
                tokens=options.tokens or _TOKENS[device.type],
                passes=options.passes,
                budget=budget,
                prefetch=options.prefetch,
                in_memory=in_memory,
            )
            outcomes[name] = run_apart(job, progress)
            if name == INSTALLED:
                readings.append(bandwidth())  # disks of shared machines change their pace: take both sides
        differing = _differing(files)
    return DemoResult(
        options=options,
        config=config,
        device=device_name(device),
        model_bytes=config.parameters * stored.itemsize,
        budget=budget,
        in_memory=in_memory,
        bandwidth=max(readings),
        bandwidth_kind=kind,
        outcomes=outcomes,
        differing=differing,
    )


def run_apart(job: Job, progress: Progress = ignore) -> Outcome:
    """Run a job in a process of its own.

    Raises
    ------
    DynswapError
        As it was raised there; if that was of another kind, with the end of the traceback.
    """
    done, whole = 0, job.warm_up + job.passes + 1

    def step() -> None:
        nonlocal done
        done += 1
        progress(job.baseline, done, whole)

    try:
        return Isolated().run(baseline.run, job, step=step)
    except ProcessError as error:
        raise ProcessError(f"{job.baseline} {error}") from None


def _differing(files: dict[str, Path]) -> list[str]:
    """Return the baselines whose outputs are not those of the resident model."""
    outputs = {name: torch.load(file, weights_only=True) for name, file in files.items() if file.exists()}
    return [
        name
        for name, mine in outputs.items()
        if not all(torch.equal(left, right) for left, right in zip(outputs[RESIDENT], mine, strict=True))
    ]
