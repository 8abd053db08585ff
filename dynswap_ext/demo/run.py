"""The demo: one model run every way, each alone in a process, measured and compared."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynswap_ext import errors
from dynswap_ext.demo.contender import Job, Outcome
from dynswap_ext.demo.files import Watcher, cache_folder, checkpoint_file
from dynswap_ext.demo.measure import disk_bandwidth, pinned_bandwidth
from dynswap_ext.demo.model import DecoderConfig, config_for
from dynswap_ext.demo.units import parse_share, parse_size
from dynswap_ext.errors import ConfigError, DynswapError

#: An input that computes for about as long as the weights take to arrive, on the usual machine of its kind.
_TOKENS = {"cpu": 256, "cuda": 4096}
_WARM_UP = 2  # the first pass learns the order, the second begins with a full ring


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says; sizes are as people write them.

    Attributes
    ----------
    size
        Of the checkpoint.
    budget
        A size, or a share of the model.
    prefetch
        Groups ahead.
    device
        None is the accelerator if there is one, else the CPU.
    dtype, stored_dtype
        Of the computation and of the file; None: float32 on the CPU, bfloat16 elsewhere; and as `dtype`.
    passes, tokens
        Timed passes of each way, and the length of an input; `tokens` None is chosen by device.
    source
        Masters in a ``file``, or copied to ``ram`` before; None: file on the CPU, ram elsewhere.
    folder, keep
        Where the checkpoint is written, and whether it stays and is used again; None is the user's cache.
    """

    size: str = "1.5GB"
    budget: str = "1/4"
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
class Contender:
    """A way to run the model: its name in the table and what sets it apart."""

    name: str
    way: str
    environment: dict[str, str]


RESIDENT = Contender("resident", "resident", {})
INSTALLED = Contender("dynswap", "installed", {})
PYTHON = Contender("pure Python", "installed", {"DYNSWAP_BACKEND": "python"})
HOOK = Contender("classic hook", "hook", {})
CONTENDERS = (RESIDENT, INSTALLED, PYTHON, HOOK)


@dataclass(frozen=True)
class DemoResult:
    """What was measured, for the table and for programs."""

    options: DemoOptions
    config: DecoderConfig
    device: str
    model_bytes: int
    budget: int
    in_memory: bool
    bandwidth: float  #: bytes a second: the best of the readings beside the runs
    bandwidth_kind: str
    outcomes: dict[str, Outcome]
    differing: list[str]  #: contenders whose outputs were not those of the resident model, to the bit

    @property
    def limit_seconds(self) -> float | None:
        """max(compute, bytes / bandwidth) of a pass of the installed model."""
        resident, installed = self.outcomes.get(RESIDENT.name), self.outcomes.get(INSTALLED.name)
        if resident is None or installed is None or installed.moved_bytes_per_pass is None:
            return None
        return max(statistics.median(resident.seconds), installed.moved_bytes_per_pass / self.bandwidth)

    def to_json(self) -> str:
        """Everything, and the limit."""
        return json.dumps({**dataclasses.asdict(self), "limit_seconds": self.limit_seconds}, indent=2)


def run_demo(options: DemoOptions, watcher: Watcher) -> DemoResult:
    """Write the checkpoint, run every contender, compare.

    Raises
    ------
    ConfigError
        An option is not understood.
    SourceError
        There is no room for the checkpoint.
    DynswapError
        A contender failed; carries what it wrote.
    """
    device = _device(options.device)
    dtype = _dtype(options.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    stored = _dtype(options.stored_dtype) or dtype
    config = config_for(parse_size(options.size), stored)
    model_bytes = config.parameters * stored.itemsize
    if options.source not in (None, "file", "ram"):
        raise ConfigError(f"source is 'file' or 'ram', not {options.source!r}")
    in_memory = (options.source or ("file" if device.type == "cpu" else "ram")) == "ram"
    if options.passes < 1 or options.prefetch < 0 or (options.tokens is not None and options.tokens < 1):
        raise ConfigError("passes is at least 1, prefetch at least 0, tokens is at least 1")
    budget = parse_share(options.budget, config.parameters * dtype.itemsize)

    folder = Path(options.folder) if options.folder else cache_folder()
    with (
        checkpoint_file(folder, config, stored, watcher, keep=options.keep) as path,
        tempfile.TemporaryDirectory() as scratch,
    ):
        job = Job(
            way="",
            checkpoint=str(path),
            config=dataclasses.asdict(config),
            device=str(device),
            dtype=None if dtype == stored else str(dtype).removeprefix("torch."),
            batch=1,
            tokens=options.tokens or _TOKENS["cpu" if device.type == "cpu" else "cuda"],
            passes=options.passes,
            warm_up=_WARM_UP,
            budget=budget,
            prefetch=options.prefetch,
            in_memory=in_memory,
            outputs="",
        )
        kind, measure = _bandwidth(device, path, in_memory)
        readings = [measure()]
        outcomes: dict[str, Outcome] = {}
        files = {contender.name: Path(scratch, f"{contender.name}.pt") for contender in CONTENDERS}
        for contender in CONTENDERS:
            if contender is PYTHON and outcomes[INSTALLED.name].provider == "python":
                continue
            mine = dataclasses.replace(job, way=contender.way, outputs=str(files[contender.name]))
            watcher.begin(contender.name, mine.warm_up + mine.passes + 1)
            outcomes[contender.name] = run_contender(contender, mine, watcher)
            if contender is INSTALLED:
                readings.append(measure())  # disks of shared machines change their mind: take both sides
        differing = _differing(files)
    return DemoResult(
        options=options,
        config=config,
        device=_device_name(device),
        model_bytes=model_bytes,
        budget=budget,
        in_memory=in_memory,
        bandwidth=max(readings),
        bandwidth_kind=kind,
        outcomes=outcomes,
        differing=differing,
    )


def run_contender(contender: Contender, job: Job, watcher: Watcher) -> Outcome:
    """Run a job in a process of its own.

    Raises
    ------
    DynswapError
        What was raised there; if it was of another kind, with the end of the traceback.
    """
    command = [sys.executable, "-m", "dynswap_ext.demo.contender", job.to_json()]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=os.environ | contender.environment,
        ) as process,
    ):
        assert process.stdout is not None
        outcome: Outcome | None = None
        try:
            for line in process.stdout:
                event: dict[str, Any] = json.loads(line)
                kind = event.pop("event")
                if kind == "done":
                    outcome = Outcome(**event)
                elif kind == "error":
                    raise getattr(errors, event["kind"])(event["message"])
                else:
                    watcher.step()
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        complaints.seek(0)
        if code != 0 or outcome is None:
            tail = "\n".join(complaints.read().strip().splitlines()[-15:])
            raise DynswapError(f"{contender.name} ended with status {code}:\n{tail}")
        return outcome


def _differing(files: dict[str, Path]) -> list[str]:
    """Names of the contenders whose outputs are not those of the resident model."""
    outputs = {name: torch.load(file, weights_only=True) for name, file in files.items() if file.exists()}
    expected = outputs[RESIDENT.name]
    return [
        name
        for name, mine in outputs.items()
        if not all(torch.equal(left, right) for left, right in zip(expected, mine, strict=True))
    ]


def _bandwidth(device: torch.device, path: Path, in_memory: bool) -> tuple[str, Callable[[], float]]:
    if device.type == "cuda" and in_memory:
        return "copies from pinned memory", lambda: pinned_bandwidth(device)
    return "sequential direct reads of the same file", lambda: disk_bandwidth(path)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is not a device: {str(error).splitlines()[0]}") from error
    if device.type not in _TOKENS:
        raise ConfigError(f"the demo measures on cpu and cuda, not on {device.type}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("this torch sees no CUDA device; run with --device cpu")
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        raise ConfigError(f"{name!r} is none of float32, bfloat16, float16, float64")
    return dtype  # type: ignore[no-any-return]
