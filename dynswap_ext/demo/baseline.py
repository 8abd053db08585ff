"""One way to run the demo's model, measured: installed, or a baseline to compare with."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

import dynswap_ext
from dynswap_ext import checkpoint
from dynswap_ext._util.clock import DeviceClock
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import PeakMemory, disk_bytes_read
from dynswap_ext.demo.hook import install_hook
from dynswap_ext.demo.model import Decoder, DecoderConfig

__all__ = ["BASELINES", "HOOK", "INSTALLED", "PYTHON", "RESIDENT", "Job", "Outcome", "run"]

#: All weights on the device; dynswap_ext with its provider; with the pure-Python one; the classic hook.
RESIDENT, INSTALLED, PYTHON, HOOK = "resident", "dynswap", "pure Python", "classic hook"
BASELINES: Final = (RESIDENT, INSTALLED, PYTHON, HOOK)
_DROP_EVERY: Final = 32 << 20


@dataclass(frozen=True)
class Job:
    """What a process does.

    Attributes
    ----------
    baseline
        One of `BASELINES`.
    checkpoint, config
        The weights and the shape of the model.
    outputs
        Where the outputs of the timed passes go (a file of torch.save).
    device, dtype
        Where it computes and in what; `dtype` None keeps the stored one.
    tokens, passes, warm_up
        Length of an input, passes that are timed and passes before them.
    budget, prefetch
        For an install: bytes, and how many groups ahead.
    in_memory
        Masters are copied to RAM first, instead of being mapped from the file.
    """

    baseline: str
    checkpoint: Path
    config: DecoderConfig
    outputs: Path
    device: str = "cpu"
    dtype: torch.dtype | None = None
    tokens: int = 1
    passes: int = 5
    warm_up: int = 2  # the first pass learns the order, the second begins with a full ring
    budget: int | None = None
    prefetch: int = 2
    in_memory: bool = False


@dataclass(frozen=True)
class Outcome:
    """What was measured; None is what cannot be measured here."""

    seconds: list[float]
    peak_bytes: int | None  #: over what was in use at the start of the run
    disk_bytes_per_pass: float | None
    provider: str = ""
    backend: str = ""
    moved_bytes_per_pass: float | None = None
    stall_seconds_per_pass: float | None = None
    load_seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


def run(job: Job, step: Callable[[], None] = lambda: None) -> Outcome:
    """Do the job in this process; call `step` when the model is ready, and after each pass."""
    device = torch.device(job.device)
    start = time.perf_counter()
    model = checkpoint.load(lambda: Decoder(job.config), job.checkpoint).eval()
    load_seconds = time.perf_counter() - start
    inputs = [_input(job, number).to(device) for number in range(job.warm_up + job.passes)]
    _touch_libraries(job, next(model.parameters()).dtype, inputs[0])
    drop_file_cache(job.checkpoint)

    memory = PeakMemory(device)
    if job.in_memory:
        _replace(model, job.checkpoint, lambda tensor: tensor.clone())
    handle = _prepare(model, job, device)
    step()

    cold = job.baseline != RESIDENT and not job.in_memory
    clock = DeviceClock(device)
    with torch.inference_mode():

        def passes(inputs: list[Tensor]) -> tuple[list[float], list[Tensor]]:
            """Run passes, on an accelerator without a host synchronisation between them."""
            outputs, marks = [], []
            for tokens in inputs:
                if cold:  # what the last pass left in the page cache
                    drop_file_cache(job.checkpoint)
                begin = clock.mark()
                outputs.append(model(tokens))
                marks.append((begin, clock.mark()))
                step()
            return [clock.seconds(begin, end) for begin, end in marks], outputs

        passes(inputs[: job.warm_up])
        before, disk_before = _stats(handle), disk_bytes_read()
        seconds, outputs = passes(inputs[job.warm_up :])
        after, disk = _stats(handle), disk_bytes_read() - disk_before
    peak = memory.more()
    torch.save([output.cpu() for output in outputs], job.outputs)
    disk_bytes = disk / job.passes if disk_before else None  # 0: the system does not tell
    outcome = Outcome(seconds, peak or None, disk_bytes, load_seconds=load_seconds)
    if handle is None:
        return outcome
    handle.uninstall()
    moved, stalled = (after[name] - before[name] for name in ("bytes_moved", "stall_ns"))
    # In pure Python operations read a mapped file themselves: what they read and wait for is not counted.
    counted = moved or job.in_memory or handle.provider == "native"
    return dataclasses.replace(
        outcome,
        provider=handle.provider,
        backend=handle.backend,
        moved_bytes_per_pass=moved / job.passes if counted else None,
        stall_seconds_per_pass=stalled / 1e9 / job.passes if counted else None,
        stats=after,
    )


def _prepare(model: nn.Module, job: Job, device: torch.device) -> Any:
    """Make the model ready to be called; return the handle of an install."""
    if job.baseline == RESIDENT:

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, job.dtype if tensor.is_floating_point() else None, copy=True)

        return _replace(model, job.checkpoint, moved)
    if job.baseline == HOOK:
        install_hook(model, device=device, **({"dtype": job.dtype} if job.dtype else {}))
        return None
    return dynswap_ext.install(
        model,
        device=device,
        dtype=job.dtype,
        prefetch=job.prefetch,
        budget=job.budget,
        page_cache=False,  # a model that does not fit the memory does not fit the cache either
        provider="python" if job.baseline == PYTHON else "auto",
    )


def _input(job: Job, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(job.config.vocabulary, (1, job.tokens), generator=generator)


def _touch_libraries(job: Job, stored: torch.dtype, tokens: Tensor) -> None:
    """Run two layers of that size once: the libraries' own code and threads are not the model's memory."""
    small = dataclasses.replace(job.config, layers=2, vocabulary=64)
    with torch.inference_mode():
        Decoder(small).to(job.device, job.dtype or stored)(tokens % small.vocabulary)
    gc.collect()
    if tokens.device.type == "cuda":
        torch.cuda.empty_cache()


def _replace(model: nn.Module, path: Path, made: Callable[[Tensor], Tensor]) -> None:
    read = 0
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = made(tensor.data)
        read += tensor.nbytes
        if read > _DROP_EVERY:
            drop_file_cache(path)  # or the mapping would count in addition to the copy
            read = 0
    drop_file_cache(path)


def _stats(handle: Any) -> dict[str, Any]:
    return {} if handle is None else dataclasses.asdict(handle.stats())
