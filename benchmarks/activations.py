"""Memory and time of a training step whose saved tensors exceed what may stay, for each way to keep them.

A decoder of 24 layers trains on one long row. Each way has processes of its own, which take turns. Gradients
are compared with the plain model's, to the bit.

plain          All that the operations save for backward stays.
save_on_cpu    torch.autograd.graph.save_on_cpu around the step. On the CPU it is a copy in the same memory.
trl            Its OffloadActivations, which was torchtune's, on a GPU (`pip install trl`).
checkpoint     torch.utils.checkpoint around each layer: its forward runs twice.
dynswap        offload_activations() with a bound: to a file on the CPU, to RAM from a GPU.
both           checkpoint inside offload_activations(): the layers' inputs leave.

On the CPU, start it with MALLOC_MMAP_THRESHOLD_=1048576 in the environment: else glibc's heap keeps much of
what any way lets go of.

Peak memory is what the steps take above the model and its gradients: of the process's resident set on the
CPU, of torch's allocator on a GPU. Time is that of a step, compared with the plain one and with the limit:
the larger of the plain step's time and that in which the disk, or the bus, takes what is moved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dynswap_ext
from common import Record, native_available, parser, run_apart
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder

PLAIN, OURS, BOTH = "plain", "dynswap", "both"
WAYS = (PLAIN, "save_on_cpu", "trl", "checkpoint", OURS, BOTH)


@dataclass(frozen=True)
class Job:
    """The work of one process."""

    way: str
    config: dict[str, int]
    tokens: int
    bound: int
    steps: int
    folder: str
    gradients: str
    device: str


@dataclass
class Row:
    """What a process has measured, or why it failed."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    moved_bytes: int = 0
    step_bytes: int = 0
    hits: int = 0
    misses: int = 0
    failure: str = ""


def around_step(job: Job) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
    """Return what makes the context of a step's forward, and the offloading if it is dynswap's."""
    if job.way in (OURS, BOTH):
        folder = {"activations_folder": job.folder} if job.device == "cpu" else {}
        offloading = dynswap_ext.offload_activations(job.device, job.bound, **folder)
        return lambda: offloading, offloading
    if job.way == "save_on_cpu":
        return lambda: torch.autograd.graph.save_on_cpu(pin_memory=job.device != "cpu"), None
    if job.way == "trl":
        from trl.models.activation_offloading import OffloadActivations

        return OffloadActivations, None
    return contextlib.nullcontext, None


def checkpointed(layer: nn.Module) -> None:
    """Have a layer's forward run again in backward."""
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def run(job: Job) -> Row:
    """Do the work of one process, and return its measurements."""
    torch.manual_seed(0)
    device = torch.device(job.device)
    model = Decoder(DecoderConfig(**job.config)).to(device)
    if job.way in ("checkpoint", BOTH):
        for layer in model.layers:
            checkpointed(layer)
    vocabulary = job.config["vocabulary"]
    tokens = torch.randint(vocabulary, (1, job.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    context, offloading = around_step(job)
    row = Row()

    def step() -> Tensor:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        with context():
            loss = functional.cross_entropy(model(tokens), tokens[:, -1])
        loss.backward()
        return loss

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    memory = PeakMemory(device)
    for number in range(job.steps + 2):
        if number == 2 and offloading is not None:
            before = offloading.stats()
        start = time.perf_counter()
        step().item()
        if number >= 2:  # the first two learn the order, and what there is to keep
            row.seconds.append(time.perf_counter() - start)
    row.peak_bytes.append(memory.more())
    if offloading is not None:
        after = offloading.stats()
        row.moved_bytes = (after.offloaded_bytes - before.offloaded_bytes) // job.steps
        row.step_bytes = after.saved_step_bytes
        row.hits, row.misses = after.hits - before.hits, after.misses - before.misses
    torch.save([p.grad.cpu() for p in model.parameters() if p.grad is not None], job.gradients)
    return row


def disk_speed(folder: Path, size: int) -> tuple[float, float]:
    """Return the bytes/s of writing a file of `size` bytes and of reading it, through the page cache."""
    block = os.urandom(1 << 20)
    path = folder / "speed"
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size >> 20):
            file.write(block)
    written = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(bytearray(1 << 20)):
            pass
    read = time.perf_counter()
    path.unlink()
    return size / (written - start), size / (read - written)


def bus_speed(device: torch.device, size: int) -> tuple[float, float]:
    """Return the bytes/s of copies between page-locked memory and a device: out of it, and into it."""
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def speed(to: Tensor, of: Tensor) -> float:
        to.copy_(of)
        start = time.perf_counter()
        to.copy_(of)
        torch.accelerator.synchronize(device)
        return size / (time.perf_counter() - start)

    return speed(host, there), speed(there, host)


def measure(record: Record, job: Job, ways: list[str], rounds: int, scratch: Path) -> dict[str, Row]:
    """Run each way in turn, `rounds` times, and return the rows."""
    rows = {way: Row() for way in ways}
    for _ in range(rounds):
        for way in ways:
            row = rows[way]
            if row.failure:
                continue
            made = run_apart(run, dataclasses.replace(job, way=way, gradients=str(scratch / f"{way}.pt")))
            if isinstance(made, dict):
                row.failure = made["failure"]
                continue
            made.seconds, made.peak_bytes = row.seconds + made.seconds, row.peak_bytes + made.peak_bytes
            rows[way] = made
            shown = {name: dataclasses.asdict(each) for name, each in rows.items()}
            record.figures[f"{job.tokens} tokens"] = shown
    return rows


def tell(record: Record, job: Job, rows: dict[str, Row], speed: tuple[float, float], scratch: Path) -> None:
    """Print the rows, and set the bars."""
    plain = rows[PLAIN]
    seconds = statistics.median(plain.seconds)
    peak = statistics.median(plain.peak_bytes)
    expected = torch.load(scratch / f"{PLAIN}.pt", weights_only=True)
    shown = record.figures[f"{job.tokens} tokens"]
    for way, row in rows.items():
        if row.failure:
            print(f"{job.tokens:>6} tokens  {way:<12} cannot run: {row.failure}", flush=True)
            continue
        found = torch.load(scratch / f"{way}.pt", weights_only=True)
        equal = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        took, most = statistics.median(row.seconds), statistics.median(row.peak_bytes)
        shown[way] |= {
            "time_to_plain": took / seconds,
            "peak_to_plain": most / peak,
            "gradients": "equal to the bit" if equal else "differ",
        }
        print(
            f"{job.tokens:>6} tokens  {way:<12} {took:7.3f} s a step ({took / seconds:.2f} x plain), "
            f"peak {format_bytes(most)} ({most / peak:.2f} x plain), "
            + (f"moved {format_bytes(row.moved_bytes)} each way, " if way in (OURS, BOTH) else "")
            + f"gradients {shown[way]['gradients']}",
            flush=True,
        )
    ours = rows[OURS]
    if ours.failure:
        record.bar(f"{job.tokens} tokens: dynswap runs", 0, at_least=1)
        return
    took, most = statistics.median(ours.seconds), statistics.median(ours.peak_bytes)
    moving = ours.moved_bytes / speed[0] + ours.moved_bytes / speed[1]
    limit = max(seconds, moving)
    shown["limit_seconds"], shown["plain_and_moving_to_plain"] = limit, (seconds + moving) / seconds
    record.bar(f"{job.tokens} tokens: peak / plain", most / peak, at_most=0.5)
    record.bar(f"{job.tokens} tokens: time / plain", took / seconds, at_most=1.25)
    record.bar(f"{job.tokens} tokens: time / limit", took / limit)
    record.bar(f"{job.tokens} tokens: gradients are equal", shown[OURS]["gradients"] != "differ", at_least=1)
    record.bar(f"{job.tokens} tokens: hits", ours.hits / max(1, ours.hits + ours.misses), at_least=0.95)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--hidden", type=int, help="default: 512, 2048 on a GPU")
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--tokens", help="with commas between them; default: 1024,2048, 4096,16384 on a GPU")
    options.add_argument("--bound", default="64MiB", help="what may stay (default: %(default)s)")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--rounds", type=int, default=1, help="processes of each way (default: %(default)s)")
    options.add_argument("--only", help="ways, with commas between them; the plain one always runs")
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    cuda = given.device == "cuda"
    hidden = given.hidden or (2048 if cuda else 512)
    lengths = given.tokens or ("4096,16384" if cuda else "1024,2048")
    if given.tiny:
        hidden, given.layers, lengths, given.bound, given.steps, given.rounds = 64, 3, "64", "64KiB", 1, 1
    record = Record("activations_cuda" if cuda else "activations", given.tiny)
    if not native_available(given.device):
        record.bar("the native provider is left out", 1)
        return record.finish(given.output)
    wanted = given.only.split(",") if given.only else [way for way in WAYS if cuda or way != "trl"]
    ways = [way for way in WAYS if way == PLAIN or way in wanted]
    config = DecoderConfig(hidden=hidden, layers=given.layers, vocabulary=8 * hidden)
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        scratch = Path(folder)
        size = (4 << 20) if given.tiny else (1 << 30)
        speed = bus_speed(torch.device("cuda"), size) if cuda else disk_speed(scratch, size)
        record.figures["bytes_per_second_out"], record.figures["bytes_per_second_in"] = speed
        record.figures["bound"] = parse_size(given.bound)
        for tokens in map(int, lengths.split(",")):
            job = Job(
                way=PLAIN,
                config=dataclasses.asdict(config),
                tokens=tokens,
                bound=parse_size(given.bound),
                steps=given.steps,
                folder=folder,
                gradients="",
                device=given.device,
            )
            tell(record, job, measure(record, job, ways, given.rounds, scratch), speed, scratch)
            record.write(given.output)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
