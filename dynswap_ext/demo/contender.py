"""One way to run the demo's model, alone in a process of its own, so that its peak memory is its own.

``python -m dynswap_ext.demo.contender JOB`` runs what the JSON text JOB describes, and writes one JSON object
a line: an ``event`` of ``ready``, ``pass`` (one for each), ``done`` (the outcome) or ``error``.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynswap_ext import checkpoint
from dynswap_ext.demo.hook import install_hook
from dynswap_ext.demo.measure import MemoryMeter, disk_bytes_read, drop_file_cache, timing_event
from dynswap_ext.demo.model import Decoder, DecoderConfig
from dynswap_ext.errors import DynswapError

_DROP_EVERY = 32 << 20


@dataclass(frozen=True)
class Job:
    """What a contender is to do.

    Attributes
    ----------
    way
        ``resident`` (all weights on the device), ``installed`` (dynswap_ext, with the provider that the
        environment chooses) or ``hook`` (the classic one).
    checkpoint, config
        The weights and the shape of the model.
    device, dtype
        Where it computes and in what; `dtype` None keeps the stored one.
    batch, tokens, passes, warm_up
        Size of an input, passes that are timed and passes before them.
    budget, prefetch
        For `installed`: bytes, and how many groups ahead.
    in_memory
        Masters are copied to RAM first, instead of being mapped from the file.
    outputs
        Where the outputs of the timed passes go (a file of torch.save).
    """

    way: str
    checkpoint: str
    config: dict[str, int]
    device: str
    dtype: str | None
    batch: int
    tokens: int
    passes: int
    warm_up: int
    budget: int | None
    prefetch: int
    in_memory: bool
    outputs: str

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Outcome:
    """What a contender measured; None is what cannot be measured here."""

    seconds: list[float]
    peak_bytes: int | None  #: RAM above the start of the run, or device memory in all
    disk_bytes_per_pass: float | None
    provider: str = ""
    backend: str = ""
    moved_bytes_per_pass: float | None = None
    stall_seconds_per_pass: float | None = None
    load_seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


def run(job: Job, report: Callable[[dict[str, Any]], None]) -> Outcome:
    """Do the job in this process; call `report` as it goes on."""
    device = torch.device(job.device)
    dtype: torch.dtype | None = getattr(torch, job.dtype) if job.dtype else None
    path = Path(job.checkpoint)
    config = DecoderConfig(**job.config)

    start = time.perf_counter()
    model = checkpoint.load(lambda: Decoder(config), path).eval()
    load_seconds = time.perf_counter() - start
    inputs = [_input(job, config, number).to(device) for number in range(job.warm_up + job.passes)]
    _touch_libraries(config, model, inputs[0], device, dtype)
    drop_file_cache(path)

    memory = MemoryMeter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if job.in_memory:
        _copy_to_ram(model, path)
    handle: Any = None
    if job.way == "resident":
        _make_resident(model, path, device, dtype)
    elif job.way == "hook":
        install_hook(model, device=device, **({"dtype": dtype} if dtype else {}))
    else:
        import dynswap_ext

        handle = dynswap_ext.install(
            model,
            device=device,
            dtype=dtype,
            prefetch=job.prefetch,
            budget=job.budget,
            page_cache=False,  # a model that does not fit the memory does not fit the cache either
        )
    report({"event": "ready"})

    passes = _Passes(model, device, path, cold=job.way != "resident" and not job.in_memory)
    with torch.inference_mode():
        for tokens in inputs[: job.warm_up]:
            passes.one(tokens)
            report({"event": "pass"})
        passes.forget()
        before, disk_before = _stats(handle), disk_bytes_read()
        for tokens in inputs[job.warm_up :]:
            passes.one(tokens)
            report({"event": "pass"})
        seconds = passes.seconds()
        after, disk_after = _stats(handle), disk_bytes_read()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory.peak_growth()
    torch.save([output.cpu() for output in passes.outputs], job.outputs)

    outcome = Outcome(
        seconds=seconds,
        peak_bytes=peak,
        disk_bytes_per_pass=None
        if disk_before is None or disk_after is None
        else (disk_after - disk_before) / job.passes,
        load_seconds=load_seconds,
    )
    if handle is not None:
        outcome = dataclasses.replace(
            outcome,
            provider=handle.provider,
            backend=handle.backend,
            moved_bytes_per_pass=(after["bytes_moved"] - before["bytes_moved"]) / job.passes,
            stall_seconds_per_pass=(after["stall_ns"] - before["stall_ns"]) / 1e9 / job.passes,
            stats=after,
        )
        handle.uninstall()
    return outcome


class _Passes:
    """Runs passes and times each, without a host synchronisation between them on an accelerator."""

    def __init__(self, model: nn.Module, device: torch.device, path: Path, *, cold: bool) -> None:
        self.outputs: list[Tensor] = []
        self._model, self._device, self._path, self._cold = model, device, path, cold
        self._host: list[float] = []
        self._marks: list[torch.cuda.Event] = []

    def forget(self) -> None:
        """What was run up to here was warm-up."""
        self.seconds()
        self.outputs.clear()

    def one(self, tokens: Tensor) -> None:
        """Run one pass. Cold: what the last one left in the page cache is dropped first."""
        if self._cold:
            drop_file_cache(self._path)
        if self._device.type == "cuda":
            if not self._marks:
                self._mark()
            self.outputs.append(self._model(tokens))
            self._mark()
        else:
            start = time.perf_counter()
            self.outputs.append(self._model(tokens))
            self._host.append(time.perf_counter() - start)

    def seconds(self) -> list[float]:
        """The time of each pass since the last call, once all are over."""
        seconds, self._host = self._host, []
        if self._marks:
            torch.cuda.synchronize(self._device)
            marks, self._marks = self._marks, []
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
        return seconds

    def _mark(self) -> None:
        event = timing_event()
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)


def _input(job: Job, config: DecoderConfig, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(config.vocabulary, (job.batch, job.tokens), generator=generator)


def _touch_libraries(
    config: DecoderConfig, model: nn.Module, tokens: Tensor, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Runs two layers of that size once: the libraries' own code and threads are not the model's memory."""
    stored = next(model.parameters()).dtype
    small = dataclasses.replace(config, layers=2, vocabulary=64)
    with torch.inference_mode():
        Decoder(small).to(device, dtype or stored)(tokens % small.vocabulary)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _copy_to_ram(model: nn.Module, path: Path) -> None:
    _replace(model, path, lambda tensor: tensor.clone())


def _make_resident(model: nn.Module, path: Path, device: torch.device, dtype: torch.dtype | None) -> None:
    def moved(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, copy=True)

    _replace(model, path, moved)


def _replace(model: nn.Module, path: Path, made: Callable[[Tensor], Tensor]) -> None:
    read = 0
    for tensor in chain(model.parameters(), model.buffers()):
        tensor.data = made(tensor.data)
        read += tensor.nbytes
        if read > _DROP_EVERY:
            drop_file_cache(path)  # or the mapping would count beside the copy
            read = 0
    drop_file_cache(path)


def _stats(handle: Any) -> dict[str, Any]:
    return {} if handle is None else dataclasses.asdict(handle.stats())


def main() -> None:
    """The child process's entry."""
    job = Job.from_json(sys.argv[1])

    def report(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    try:
        outcome = run(job, report)
    except DynswapError as error:  # says what to do: the parent raises it again
        report({"event": "error", "kind": type(error).__name__, "message": str(error)})
        sys.exit(2)
    report({"event": "done", **dataclasses.asdict(outcome)})


if __name__ == "__main__":
    main()
