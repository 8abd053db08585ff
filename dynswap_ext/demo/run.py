"""Runs the demo's model in one way, and measures it: resident, installed, or under the classic hook."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
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
from dynswap_ext.demo.model import Decoder, DecoderConfig
from dynswap_ext.errors import DynswapError

#: Ways to run the model: with all weights on the device, installed, installed with weights that are coded
#: without loss, and under the classic hook.
RESIDENT, INSTALLED, CODED, HOOK = "resident", "dynswap", "dynswap, coded", "classic hook"
BASELINES: Final = (RESIDENT, INSTALLED, CODED, HOOK)


@dataclass(frozen=True)
class Job:
    """The settings of one timed run."""

    baseline: str  #: one of `BASELINES`
    checkpoint: Path  #: for `CODED`, one that is coded without loss
    config: DecoderConfig
    budget: int | str  #: bytes, or "minimum"
    device: str = "cpu"
    dtype: torch.dtype | None = None  #: in which the model computes; None: the dtype of the checkpoint
    tokens: int = 1  #: of an input
    passes: int = 5  #: those that are timed
    warm_up: int = 2  #: passes before: the first learns the order, the second begins with a full ring
    prefetch: int = 2
    in_memory: bool = False  #: whether masters are copied to RAM first, and not mapped from the file
    provider: str = "auto"  #: of the install


@dataclass(frozen=True)
class Outcome:
    """The measurements of one run. None where something cannot be measured on this system."""

    seconds: list[float]
    peak_bytes: int | None  #: over what was in use at the start of the run
    disk_bytes_per_pass: float | None
    digest: str = ""  #: a checksum of all outputs of the timed passes
    provider: str = ""
    backend: str = ""
    moved_bytes_per_pass: float | None = None
    stall_seconds_per_pass: float | None = None


def run_apart(job: Job) -> Outcome:
    """Run a job in a new process, so that nothing else counts in its peak memory. Raises its errors."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            return process.submit(run_here, job).result()
    except BrokenProcessPool:
        raise DynswapError(
            f"the process of the {job.baseline} run was ended from outside, as the system does for lack of "
            "memory; choose a smaller size"
        ) from None


def run_here(job: Job) -> Outcome:
    """Run a job in this process, and return its measurements."""
    device = torch.device(job.device)
    coded_in_memory = job.in_memory and job.baseline == CODED
    model = checkpoint.load(lambda: Decoder(job.config), job.checkpoint, coded=coded_in_memory).eval()
    inputs = []
    for number in range(job.warm_up + job.passes):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(job.config.vocabulary, (1, job.tokens), generator=generator)
        inputs.append(tokens.to(device))
    _touch_libraries(job, next(model.parameters()).dtype, inputs[0])
    drop_file_cache(job.checkpoint)

    memory, clock = PeakMemory(device), DeviceClock(device)
    handle = _prepare(model, job, device)
    cold = job.baseline != RESIDENT and not job.in_memory
    outputs, marks = [], []
    with torch.inference_mode():
        for number, tokens in enumerate(inputs):
            if number == job.warm_up:
                clock.wait()
                disk_before = disk_bytes_read()
                if handle is not None:
                    handle.reset_stats()
            if cold:  # the last pass left parts of the file in the page cache
                drop_file_cache(job.checkpoint)
            begin = clock.mark()
            outputs.append(model(tokens))
            marks.append((begin, clock.mark()))
    seconds = [clock.seconds(begin, end) for begin, end in marks[job.warm_up :]]
    disk_bytes = disk_bytes_read() - disk_before
    outcome = Outcome(
        seconds,
        peak_bytes=memory.more() or None,
        disk_bytes_per_pass=disk_bytes / job.passes if disk_before else None,  # 0: the system does not tell
        digest=_digest(outputs[job.warm_up :]),
    )
    if handle is None:
        return outcome
    stats = handle.stats()
    # In pure Python, operations read mapped masters directly: what they read and wait for is not counted.
    counted = stats.bytes_moved or job.in_memory or stats.provider == "native"
    return dataclasses.replace(
        outcome,
        provider=stats.provider,
        backend=stats.backend,
        moved_bytes_per_pass=stats.bytes_moved / job.passes if counted else None,
        stall_seconds_per_pass=stats.stall_ns / 1e9 / job.passes if counted else None,
    )


def _prepare(model: nn.Module, job: Job, device: torch.device) -> dynswap_ext.Handle | None:
    """Make the model ready to run in the way of the job. Return the handle if it was installed, else None."""
    if job.in_memory and job.baseline != CODED:
        _copy_weights(model, job.checkpoint, torch.device("cpu"), None)
    if job.baseline == RESIDENT:
        _copy_weights(model, job.checkpoint, device, job.dtype)
        return None
    if job.baseline == HOOK:
        install_hook(model, device=device, dtype=job.dtype)
        return None
    return dynswap_ext.install(
        model,
        device=device,
        dtype=job.dtype,
        prefetch=job.prefetch,
        budget=job.budget,
        host_budget="minimum",  # a model that does not fit the memory does not fit the cache either
        provider=job.provider,
    )


def _copy_weights(model: nn.Module, path: Path, device: torch.device, dtype: torch.dtype | None) -> None:
    for tensor in chain(model.parameters(), model.buffers()):
        wanted = dtype if tensor.is_floating_point() else None
        tensor.data = tensor.data.to(device, wanted, copy=True)
        drop_file_cache(path)  # else the mapped bytes would count as memory in addition to the copy


def _touch_libraries(job: Job, stored: torch.dtype, tokens: Tensor) -> None:
    """Run two layers of the job's width once, so that memory of libraries is not counted as the model's."""
    small = dataclasses.replace(job.config, layers=2, vocabulary=64)
    with torch.inference_mode():
        Decoder(small).to(job.device, job.dtype or stored)(tokens % small.vocabulary)
    gc.collect()
    if tokens.device.type != "cpu":
        torch.accelerator.empty_cache()


def _digest(outputs: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(bytes(output.cpu().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def install_hook(model: nn.Module, **to: Any) -> None:
    """Install the classic hook, a reference to measure against: each read of a weight copies it.

    As other installers of this kind do, it makes a class for each module, with a ``__getattr__`` in Python
    that calls ``.to(**to)`` on the weight. It prefetches nothing and keeps no copies.
    """
    for module in list(model.modules()):
        module.__class__ = _hooked(module.__class__, to)


def uninstall_hook(model: nn.Module) -> None:
    """Undo `install_hook`: give each module its class back."""
    for module in model.modules():
        module.__class__ = module.__class__.__bases__[0]


def _hooked(original: type, to: dict[str, Any]) -> type:
    def __getattr__(self: nn.Module, name: str) -> Any:
        parameter = self.__dict__["_parameters"].get(name)
        if parameter is not None:
            return nn.Parameter(parameter.to(**to), requires_grad=parameter.requires_grad)
        buffer = self.__dict__["_buffers"].get(name)
        if buffer is not None:
            return buffer.to(**to)
        return original.__getattr__(self, name)  # type: ignore[attr-defined]

    return type(f"Hooked_{original.__name__}", (original,), {"__getattr__": __getattr__})
