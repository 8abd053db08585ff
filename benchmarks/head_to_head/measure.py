"""The work of one process: makes a baseline ready, calls the model, and measures both."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynswap_ext import checkpoint
from dynswap_ext._util.clock import timing_event
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import PeakMemory, disk_bytes_read, resident_bytes
from head_to_head.baselines import BASELINES, RESIDENT, Setting
from head_to_head.job import FILE, Job, Row
from head_to_head.workloads import WORKLOADS, Workload

_FEW = 16
_WARM_UP = 2  # calls: the first learns the order, the second begins with prefetched weights
_LEAST, _LEAST_COLD, _MOST = 5, 3, 400  # numbers of calls that are timed


def write_checkpoint(job: Job) -> Row:
    """Write the workload's model with random weights, and wait until it is on the disk."""
    torch.manual_seed(0)
    checkpoint.save(WORKLOADS[job.workload](job.size).build(), Path(job.checkpoint))
    _settle(Path(job.checkpoint))
    return Row()


def measure(job: Job) -> Row:
    """Measure one baseline."""
    device = torch.device(job.device)
    workload = WORKLOADS[job.workload](job.size)
    setting = Setting(device, job.placement, Path(job.checkpoint), Path(job.scratch), workload.build)
    cold = job.placement == FILE and job.baseline != RESIDENT
    row = Row()
    _touch_libraries(device)
    inputs = workload.inputs(device)

    memory = _Memory(device)
    if job.placement == FILE:
        drop_file_cache(setting.checkpoint)
    begun = time.perf_counter()
    prepared = BASELINES[job.baseline].prepare(setting)
    _synchronize(device)
    row.ready_seconds = time.perf_counter() - begun
    row.note = prepared.note
    files, least = (_Files(setting), _LEAST_COLD) if cold else (None, _LEAST)

    with torch.no_grad():
        calls = _Calls(workload, prepared.model, inputs, device, files)
        first: list[Tensor] = []
        outputs: list[Tensor] = []
        before: dict[str, Any] = {}
        disk_before = 0
        begun = time.perf_counter()
        for number, outputs in enumerate(calls.cycles()):
            if number == 0:
                first = outputs
            if calls.done >= _WARM_UP and not before:
                row.first_seconds = calls.seconds()[0]
                row.loading_peak_bytes = memory.peak()
                memory.begin_again()
                before, disk_before = _stats(prepared.handle) | {"calls": calls.done}, disk_bytes_read()
                begun = time.perf_counter()
                continue
            if not before:
                continue
            timed, passed = calls.done - before["calls"], time.perf_counter() - begun
            enough = timed >= least and passed > job.seconds
            if enough or timed >= _MOST or passed > job.patience:
                break
        row.seconds = calls.seconds()[before["calls"] :]
        row.peak_bytes = memory.peak()
        called = len(row.seconds) * (1 + workload.begin_calls / workload.calls)
        if job.placement == FILE:
            row.disk_bytes = (disk_bytes_read() - disk_before) / called
        after = _stats(prepared.handle)
        if after:
            row.stats = after
            row.moved_bytes = (after["bytes_moved"] - before["bytes_moved"]) / called
        elif device.type != "cpu":
            row.moved_bytes = calls.count_moved()
        row.outputs = _outputs(job, first, outputs)
    return row


class _Calls:
    """Calls the model in cycles, and times each call alone."""

    def __init__(
        self,
        workload: Workload,
        model: Any,
        inputs: dict[str, Any],
        device: torch.device,
        files: _Files | None,
    ) -> None:
        self._workload, self._model, self._inputs, self._device = workload, model, inputs, device
        self._files = files
        self._host: list[float] = []
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def done(self) -> int:
        """Return the number of calls so far."""
        return len(self._host) + len(self._marks)

    def cycles(self) -> Iterator[list[Tensor]]:
        """Run one cycle after the other; yield the outputs of each."""
        while True:
            outputs = []
            if self._files:
                self._files.drop()
            state = self._workload.begin(self._model, self._inputs)
            for number in range(self._workload.calls):
                if self._files:
                    self._files.drop()
                outputs.append(self._timed(state, number))
            _synchronize(self._device)
            yield outputs

    def _timed(self, state: dict[str, Any], number: int) -> Tensor:
        if self._device.type == "cuda":
            begin, end = timing_event(), timing_event()
            begin.record()
            output = self._workload.call(self._model, state, number)
            end.record()
            self._marks.append((begin, end))
            return output
        start = time.perf_counter()
        output = self._workload.call(self._model, state, number)
        self._host.append(time.perf_counter() - start)
        return output

    def seconds(self) -> list[float]:
        """Return the seconds of each call so far."""
        _synchronize(self._device)
        return self._host + [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]

    def count_moved(self) -> float:
        """Return the bytes that a call copies from host memory to the device, counted in an extra cycle."""
        state = self._workload.begin(self._model, self._inputs)
        with _Moved() as moved:
            for number in range(self._workload.calls):
                self._workload.call(self._model, state, number)
        return moved.bytes / self._workload.calls


class _Moved(TorchDispatchMode):
    """Counts the bytes that torch copies from host memory to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_to_copy" and args[0].device.type == "cpu" and out.device.type != "cpu":
            self.bytes += out.nbytes
        elif name == "copy_" and args[1].device.type == "cpu" and args[0].device.type != "cpu":
            self.bytes += args[0].nbytes
        return out


class _Files:
    """The files that a baseline reads. They are dropped from the page cache before each call."""

    def __init__(self, setting: Setting) -> None:
        self._checkpoint = setting.checkpoint
        self._others = [path for path in setting.scratch.rglob("*") if path.is_file()]
        if len(self._others) > _FEW:
            os.sync()  # faster than one fsync for each of many files
        else:
            for path in self._others:
                _settle(path)

    def drop(self) -> None:
        """Drop from the page cache what the last call read."""
        drop_file_cache(self._checkpoint)
        for path in self._others:  # not mapped between calls
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class _Memory:
    """Measures the peak of device memory, or of resident memory above that at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = resident_bytes()
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the peak so far."""
        self._now = resident_bytes()
        self._meter = PeakMemory(self._device)

    def peak(self) -> int | None:
        """Return the peak since the last start, in bytes; None if the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, self._now - self._base + self._meter.more()) if self._base else None


def _outputs(job: Job, first: list[Tensor], last: list[Tensor]) -> str:
    """Compare the outputs of the first and the last cycle with the resident model's; return words."""
    path = Path(job.reference)
    cycles = [[output.cpu() for output in outputs] for outputs in (first, last)]
    if job.baseline == RESIDENT and not path.exists():
        if not all(bool(output.isfinite().all()) for output in cycles[0]):
            raise ValueError("the resident model's outputs are not finite")
        torch.save(cycles[0], path)
    if not path.exists():
        return "not compared: no resident model ran"
    expected: list[Tensor] = torch.load(path, weights_only=True)
    if all(
        torch.equal(left, right) for outputs in cycles for left, right in zip(outputs, expected, strict=True)
    ):
        return "bit-equal"
    worst = max(
        float((left.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30))
        for outputs in cycles
        for left, right in zip(outputs, expected, strict=True)
    )
    return f"off by {worst:.1e}"


def _touch_libraries(device: torch.device) -> None:
    """Start the libraries' threads and load their code, so that a baseline's figures do not include it."""
    x = torch.randn(64, 64, device=device)
    torch.nn.functional.linear(x, x).relu_().softmax(-1)
    torch.nn.functional.conv2d(x[None, None], x[:3, :3][None, None])
    _synchronize(device)


def _settle(path: Path) -> None:
    """Write a file's dirty pages to the disk, since they cannot be dropped from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _stats(handle: Any) -> dict[str, Any]:
    return {} if handle is None else dataclasses.asdict(handle.stats())
