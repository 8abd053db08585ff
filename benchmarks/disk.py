"""From a checkpoint on disk to the first output and on, compared with the disk and with other ways to load.

The model is a float32 decoder in a safetensors file, and in a file of torch.save, on the CPU. Neither file
is in the page cache when a baseline begins. Each baseline has a process of its own, with torch's code warmed
up.

first pass     The first forward after `load` and `install`, an input of one token: bytes / time, against
               `dd iflag=direct bs=16M` of the same file. Readings of dd and passes alternate.
to the output  Time of load and first forward, for an input of one token and for one that computes about as
               long as the file takes to read, against PyTorch's mmap recipe, torch.load + load_state_dict,
               safetensors' load_file, and accelerate's disk offload (`pip install accelerate`). The speed of
               mappings depends on the system's read-ahead: once it is the machine's, once Linux's default
               (128 KiB), which takes root to set for that time.
warm           Later passes with a budget of a quarter, compute-bound, against the resident model's.
shared         Two processes stream one file at a time: their memory, summed (PSS), and what both read of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dynswap_ext
from common import Record, dd, native_available, parser, run_apart
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import disk_bytes_read
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, checkpoint_file, config_for

DYNSWAP, RESIDENT = "dynswap", "resident"
PEERS = (
    "torch.load(mmap=True)",
    "torch.load + load_state_dict",
    "safetensors load_file",
    "accelerate disk offload",
)
PARTS = ["first", "output", "warm", "shared"]


@dataclass(frozen=True)
class Job:
    """The work of one process: how it loads the model, from which files, and what it runs."""

    way: str
    config: dict[str, int]
    safetensors: str
    untied: str  #: the safetensors file with the tied head under both its names, for accelerate
    torch: str
    budget: int
    tokens: int
    passes: int
    scratch: str


@dataclass
class Row:
    """The measurements of a process, or the reason why it failed."""

    load: float = 0.0
    seconds: list[float] = field(default_factory=list)  #: of each pass
    disk_bytes: int = 0
    failure: str = ""

    @property
    def to_output(self) -> float:
        """Return the seconds from the file to the first output."""
        return self.load + self.seconds[0]


def skeleton(config: DecoderConfig) -> nn.Module:
    """Return the model on the meta device, except for the buffers that no checkpoint holds."""
    with torch.device("meta"):
        model = Decoder(config)
    small = dict(Decoder(dataclasses.replace(config, layers=1, vocabulary=8)).named_buffers())
    for name, _ in list(model.named_buffers()):
        module, _, attribute = name.rpartition(".")
        first = ".".join("0" if part.isdigit() else part for part in name.split("."))
        setattr(model.get_submodule(module), attribute, small[first])
    return model


def load(job: Job, config: DecoderConfig) -> nn.Module:
    """Return the model, ready for its first forward, loaded as the baseline's documentation says."""
    if job.way == DYNSWAP:
        model: nn.Module = checkpoint.load(lambda: Decoder(config), job.safetensors)
        dynswap_ext.install(model, device="cpu", budget=job.budget)
        return model
    if job.way == "accelerate disk offload":
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch

        with init_empty_weights():
            model = Decoder(config)
        device_map: dict[str, Any] = {name: "disk" for name, _ in model.named_children()}
        device_map["norm"] = "cpu"  # accelerate refuses a map that puts nothing on a device
        dispatched: nn.Module = load_checkpoint_and_dispatch(
            model, job.untied, device_map=device_map, offload_folder=job.scratch
        )
        return dispatched
    if job.way == "torch.load + load_state_dict":
        model = Decoder(config)
        model.load_state_dict(torch.load(job.torch, weights_only=True))
        return model
    model = skeleton(config)
    if job.way == "safetensors load_file":
        state = load_file(job.safetensors)
    else:
        state = torch.load(job.torch, mmap=True, weights_only=True)
    model.load_state_dict(state, assign=True, strict=False)  # the file has the tied head once
    model.head.weight = model.embedding.weight
    if job.way == RESIDENT:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def run(job: Job) -> Row:
    """Do the work of one process, and return its measurements."""
    config = DecoderConfig(**job.config)
    tokens = torch.randint(config.vocabulary, (1, job.tokens), generator=torch.Generator().manual_seed(1))
    small = dataclasses.replace(config, layers=1, vocabulary=64)
    skeleton(small)
    with torch.inference_mode():  # so that the start of torch's code and threads is not measured
        Decoder(small)(tokens % 64)
    drop_caches(job)
    row = Row()
    before = disk_bytes_read()
    start = time.perf_counter()
    model = load(job, config).eval()
    row.load = time.perf_counter() - start
    with torch.inference_mode():
        for _ in range(job.passes):
            start = time.perf_counter()
            model(tokens)
            row.seconds.append(time.perf_counter() - start)
    row.disk_bytes = disk_bytes_read() - before
    return row


def drop_caches(job: Job) -> None:
    for path in (job.safetensors, job.untied, job.torch):
        drop_file_cache(Path(path))


def apart(job: Job) -> Row:
    row = run_apart(run, job)
    return row if isinstance(row, Row) else Row(**row)


def first_pass(record: Record, job: Job, path: Path, rounds: int, bar: float | None) -> None:
    """Measure cold passes and dd in turn."""
    readings, rates = [dd(path)], []
    for _ in range(rounds):
        row = apart(dataclasses.replace(job, tokens=1, passes=1))
        if row.failure:
            raise SystemExit(row.failure)
        rates.append(path.stat().st_size / row.seconds[0])
        readings.append(dd(path))
    record.figures["dd_bytes_per_second"], record.figures["first_pass_bytes_per_second"] = readings, rates
    ratio = statistics.median(rates) / statistics.median(readings)
    record.bar("first pass, cold: bytes a second / dd iflag=direct", ratio, at_least=bar)


def to_the_output(
    record: Record, job: Job, tokens: int, rounds: int, bar: float | None, under: str = ""
) -> None:
    """Measure load and first forward of every baseline in turn."""
    rows: dict[str, list[Row]] = {}
    for _ in range(rounds):
        for way in (DYNSWAP, *PEERS):
            rows.setdefault(way, []).append(apart(dataclasses.replace(job, way=way, tokens=tokens, passes=1)))
    record.figures[f"to the output, {tokens} token(s){under}"] = {
        way: [dataclasses.asdict(row) | ({} if row.failure else {"to_output": row.to_output}) for row in each]
        for way, each in rows.items()
    }
    times = {}
    for way, each in rows.items():
        if each[0].failure:
            print(f"{tokens:>5} tokens  {way:<30} cannot run: {each[0].failure}", flush=True)
            continue
        times[way] = statistics.median(row.to_output for row in each)
        loading = statistics.median(row.load for row in each)
        print(f"{tokens:>5} tokens  {way:<30} {times[way]:7.3f} s, of it {loading:.3f} s to load", flush=True)
    ours = times.pop(DYNSWAP)
    best = min(times, key=times.__getitem__)
    name = f"load and first pass, {tokens} token(s){under}: best other ({best}) / ours"
    record.bar(name, times[best] / ours, at_least=bar)


def warm(record: Record, job: Job, tokens: int, passes: int, bar: float | None) -> None:
    """Measure later passes, and those of the resident model."""
    rows = {
        way: apart(dataclasses.replace(job, way=way, tokens=tokens, passes=passes + 2))
        for way in (RESIDENT, DYNSWAP)
    }
    record.figures["warm"] = {way: dataclasses.asdict(row) for way, row in rows.items()}
    for way, row in rows.items():
        if row.failure:
            raise SystemExit(f"{way}: {row.failure}")
    medians = {way: statistics.median(row.seconds[2:]) for way, row in rows.items()}
    name = "warm passes, compute-bound, budget a quarter: time / resident"
    record.bar(name, medians[DYNSWAP] / medians[RESIDENT], at_most=bar)


@contextmanager
def read_ahead(folder: Path, kib: int) -> Iterator[bool]:
    """Set the disk's read-ahead while the block runs. Yield False if that is not permitted."""
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    setting = next(
        (p / "queue/read_ahead_kb" for p in (device, device.parent) if (p / "queue").is_dir()), None
    )
    try:
        before = setting.read_text() if setting else ""
        if setting:
            setting.write_text(str(kib))
    except OSError:
        setting = None
    try:
        yield setting is not None
    finally:
        if setting:
            setting.write_text(before)


def pss(pid: int) -> int:
    """Return the process's share of its mapped memory, in bytes (PSS)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the PSS of a process")


def shared(record: Record, job: Job, path: Path, bar: float | None) -> None:
    """Measure two processes that stream the same file at the same time."""
    drop_caches(job)
    both = json.dumps(dataclasses.asdict(dataclasses.replace(job, tokens=1, passes=4)))
    command = [sys.executable, __file__, "--hold", "--job", both]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        rows = [json.loads(child.stdout.readline()) for child in children if child.stdout]
        held = [pss(child.pid) for child in children]
    finally:
        for child in children:
            child.communicate("go\n")
    size = path.stat().st_size
    record.figures["shared"] = {"pss_bytes": held, "file_bytes": size, "rows": rows}
    allowed = 1.1 * size + 2 * job.budget
    record.bar(
        "two processes on one file: PSS summed / (1.1 x file + budgets)", sum(held) / allowed, at_most=bar
    )
    read = sum(row["disk_bytes"] for row in rows)
    record.bar("two processes on one file, 4 passes each: read from the disk / file", read / size)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="2GB")
    options.add_argument("--tokens", type=int, default=1024, help="of the compute-bound input")
    options.add_argument(
        "--balanced", type=int, default=256, help="tokens that compute as long as the disk reads"
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    options.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help="some of the parts")
    options.add_argument("--job", help="used between the processes")
    options.add_argument("--hold", action="store_true", help="used between the processes")
    given = options.parse_args()
    if given.job:
        print(json.dumps(dataclasses.asdict(run(Job(**json.loads(given.job))))), flush=True)
        if given.hold:
            sys.stdin.readline()
        return 0
    if given.tiny:
        given.size, given.tokens, given.balanced, given.rounds, given.passes = "24MB", 16, 8, 1, 2
    record = Record("disk", given.tiny)
    config = config_for(parse_size(given.size), torch.float32)
    native = native_available()
    with (
        checkpoint_file(given.folder, config, torch.float32) as path,
        tempfile.TemporaryDirectory(dir=given.folder) as scratch,
    ):
        pickled, untied = Path(scratch) / "model.pt", Path(scratch) / "untied.safetensors"
        state = checkpoint.load(lambda: Decoder(config), path).state_dict()
        torch.save(dict(state), pickled)
        save_file({**state, "head.weight": state["head.weight"].clone()}, untied)
        del state
        for written in (pickled, untied):
            with written.open("rb+") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
        job = Job(
            way=DYNSWAP,
            config=dataclasses.asdict(config),
            safetensors=str(path),
            untied=str(untied),
            torch=str(pickled),
            budget=path.stat().st_size // 4,
            tokens=1,
            passes=1,
            scratch=scratch,
        )
        record.figures["file_bytes"], record.figures["budget"] = path.stat().st_size, job.budget
        if "first" in given.only:
            first_pass(record, job, path, given.rounds, 0.90 if native else None)
        if "output" in given.only:
            to_the_output(record, job, 1, given.rounds, None)  # no bar: the disk is the limit for all
            bar = 1.5 if native else None
            to_the_output(record, job, given.balanced, given.rounds, bar, ", the machine's read-ahead")
            with read_ahead(given.folder, 128) as permitted:
                if permitted:
                    to_the_output(record, job, given.balanced, given.rounds, bar, ", read-ahead 128 KiB")
        if "warm" in given.only:
            warm(record, job, given.tokens, given.passes, 1.10 if native else None)
        if "shared" in given.only:
            shared(record, job, path, 1 if native else None)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
