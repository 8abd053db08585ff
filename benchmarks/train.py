"""A training step of a model on disk with a budget, LoRA and full, compared with other tools.

A decoder has masters that are mapped from a safetensors file. Each baseline has processes of its own. On a
GPU (`--device cuda`) masters are copied to RAM first, and stream from there. Time is compared with the
limit: max(resident, bytes moved / bandwidth of copies from pinned memory, gradients' bytes / the same).

resident      All weights in RAM, or on the GPU.
dynswap       Installed with a budget; the native provider, and pure Python.
classic hook  Each attribute read converts the weight again. Its gradients go to copies that are lost.
accelerate    cpu_offload with the masters in RAM, and disk_offload; diffusers' group offload.
RamTorch      Its Linear in place of torch's.

A step is forward and backward over one input. Then the trained weights' gradients are compared with the
resident model's and freed. LoRA trains a low-rank pair for each matrix, and streams the frozen matrices
twice: forward and backward. A full step also needs room for every gradient. Bytes moved a step are compared
with the least possible: what does not fit the budget, twice. The row of a baseline that cannot run has the
reason; the peers come with `pip install accelerate diffusers ramtorch`.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynswap_ext
from common import Record, native_available, parser, run_apart
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, checkpoint_file, config_for
from dynswap_ext.demo.run import install_hook
from dynswap_ext.planning.rates import pinned_bandwidth

NATIVE, PYTHON, RESIDENT = "dynswap", "dynswap in pure Python", "resident"
#: Notes that a baseline's row has after its figures.
NOTES = {
    "classic hook": "its gradients go to copies that nobody keeps; the masters get none, without an error",
    "accelerate cpu_offload": "its hooks put copies in the parameters' places for the forward alone",
    "diffusers group offload": "on the CPU alone it moves nothing: all weights are in RAM",
    "accelerate disk_offload": "its hooks put copies in the parameters' places for the forward alone",
}


@dataclass(frozen=True)
class Job:
    """The work of one process: a baseline, a task and a model."""

    way: str
    task: str
    checkpoint: str
    config: dict[str, int]
    budget: int
    prefetch: int
    tokens: int
    steps: int
    rank: int
    gradients: str
    device: str = "cpu"


@dataclass
class Row:
    """The measurements of a process, or the reason why it failed."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    failure: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    trained_bytes: int = 0

    def joined(self, other: Row) -> Row:
        """Return the row with another process's measurements of the same."""
        return dataclasses.replace(
            other,
            seconds=self.seconds + other.seconds,
            peak_bytes=max(self.peak_bytes or 0, other.peak_bytes or 0) or None,
        )


class LowRank(nn.Module):
    """A frozen matrix and a trained low-rank pair, whose results are added."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.t() @ self.up.t()
        return y


def add_low_rank(model: nn.Module, rank: int) -> None:
    model.requires_grad_(False)
    torch.manual_seed(0)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "head":  # the head is tied to the embedding
                setattr(module, name, LowRank(child, rank))


def make_resident(model: nn.Module, path: Path) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    drop_file_cache(path)


def prepare(job: Job, model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the model as the baseline runs it, and dynswap's handle or None."""
    path, device = Path(job.checkpoint), torch.device(job.device)
    if job.way in (NATIVE, PYTHON):
        if device.type != "cpu":
            make_resident(model, path)  # in RAM, where it is page-locked, and streamed from there
        backend = "native" if job.way == NATIVE else "python"
        return model, dynswap_ext.install(
            model, device=device, budget=job.budget, prefetch=job.prefetch, provider=backend
        )
    if job.way == "accelerate disk_offload":
        from accelerate import disk_offload

        folder = Path(job.gradients).with_suffix("")
        disk_offload(model, str(folder), execution_device=device, offload_buffers=True)
        return model, None
    if job.way == "classic hook":
        # With `device` alone, it hands out the mapping itself on the CPU, instead of a copy.
        install_hook(model, device=device, copy=True)
        return model, None
    make_resident(model, path)
    if job.way == RESIDENT:
        return model.to(device), None
    if job.way == "accelerate cpu_offload":
        from accelerate import cpu_offload

        cpu_offload(model, execution_device=device, offload_buffers=True)
    elif job.way == "diffusers group offload":
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            model,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=device.type == "cuda",
        )
    elif job.way == "RamTorch":
        from ramtorch.helpers import replace_linear_with_ramtorch

        model = replace_linear_with_ramtorch(model, device=job.device)
    return model, None


def apart(job: Job) -> Row:
    row = run_apart(run, job)
    return row if isinstance(row, Row) else Row(**row)


def run(job: Job) -> Row:
    """Do the work of one process, and return its measurements."""
    config = DecoderConfig(**job.config)
    path, cuda = Path(job.checkpoint), job.device.startswith("cuda")
    model: nn.Module = checkpoint.load(lambda: Decoder(config), path)
    if job.task == "lora":
        add_low_rank(model, job.rank)
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    drop_file_cache(path)
    memory = PeakMemory()
    model, handle = prepare(job, model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocabulary, (1, job.tokens), generator=generator).to(job.device)
    row = Row(trained_bytes=sum(master.nbytes for master in names.values()))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before: dict[str, Any] = {}
    for number in range(job.steps + 2):
        for master in names.values():
            master.grad = None
        if number == 2:  # the first step learns the order, the second begins with prefetched weights
            before = dataclasses.asdict(handle.stats()) if handle else {}
        if job.way != RESIDENT and not cuda:
            drop_file_cache(path)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = functional.cross_entropy(model(tokens).float(), tokens[:, -1])
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del loss
        if number >= 2:
            row.seconds.append(seconds)
    row.peak_bytes = torch.cuda.max_memory_allocated() if cuda else memory.more()
    if handle:
        row.stats = dataclasses.asdict(handle.stats())
        row.stats["bytes_moved_per_step"] = (row.stats["bytes_moved"] - before["bytes_moved"]) / job.steps
    current = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: master.grad for name, master in names.items()}
    if all(grad is None for grad in gradients.values()) and set(current) == set(names):
        gradients = {name: p.grad for name, p in current.items()}  # a peer may have replaced parameters
    torch.save({name: grad.cpu() for name, grad in gradients.items() if grad is not None}, job.gradients)
    return row


def compare(path: Path, expected_path: Path) -> str:
    """Return how the gradients in a file differ from the expected ones, in words."""
    expected = torch.load(expected_path, weights_only=True)
    actual = torch.load(path, weights_only=True)
    missing = len(expected) - len(set(actual) & set(expected))
    if missing:
        return f"wrong: {missing} of {len(expected)} masters have none"
    if all(torch.equal(actual[name], grad) for name, grad in expected.items()):
        return "equal to the bit"
    worst = max(
        float((actual[name] - grad).norm() / grad.norm().clamp_min(1e-30)) for name, grad in expected.items()
    )
    return f"within {worst:.1e}" if worst < 1e-4 else f"wrong: off by {worst:.1e} of their norm"


def least_bytes(model_bytes: int, budget: int) -> int:
    """Return the least bytes that a step moves.

    At best, what the budget holds stays on the device from the end of forward to the start of backward.
    """
    return 2 * max(0, model_bytes - budget)


def limit_of(row: dict[str, Any], resident: float, bandwidth: float) -> float:
    """Return the least seconds of a step: compute, weights to the device, gradients from it, all at once."""
    moved = max(row["stats"].get("bytes_moved_per_step", 0), row["trained_bytes"])
    return max(resident, moved / bandwidth)


def describe(row: dict[str, Any], least: int) -> str:
    moved = row["stats"].get("bytes_moved_per_step")
    return (
        f"{statistics.median(row['seconds']):7.3f} s a step ({row['ratio_to_resident']:.2f} x resident), "
        f"peak {(row['peak_bytes'] or 0) / 2**20:.0f} MiB, "
        f"moved {'-' if moved is None else f'{moved / 2**20:.0f} MiB'} (least {least / 2**20:.0f}), "
        f"gradients {row['gradients']}"
    )


BASELINES = (
    RESIDENT,
    NATIVE,
    PYTHON,
    "classic hook",
    "accelerate cpu_offload",
    "accelerate disk_offload",
    "diffusers group offload",
    "RamTorch",
)


class Bench:
    """Runs every baseline for a task and keeps the rows."""

    def __init__(
        self,
        record: Record,
        job: Job,
        baselines: list[str],
        scratch: Path,
        output: Path | None,
        bandwidth: float | None,
        rounds: int,
    ) -> None:
        self._record, self._job, self._baselines, self._scratch = record, job, baselines, scratch
        self._output, self._bandwidth, self._rounds = output, bandwidth, rounds

    def run(self, task: str, model_bytes: int) -> None:
        rows: dict[str, Any] = self._record.figures.setdefault(task, {})
        least = least_bytes(model_bytes, self._job.budget)

        def files(way: str) -> Path:
            return self._scratch / f"{task}-{way.replace(' ', '_')}.pt"

        found: dict[str, Row] = {}
        for _ in range(self._rounds):
            for way in self._baselines:
                if way in found and found[way].failure:
                    continue
                job = dataclasses.replace(self._job, way=way, task=task, gradients=str(files(way)))
                row = apart(job)
                found[way] = found[way].joined(row) if way in found else row
                rows[way] = dataclasses.asdict(found[way])
                self._record.write(self._output)
        for way, row in found.items():
            shown = rows[way] = dataclasses.asdict(row)
            if row.failure:
                shown["gradients"] = "-"
                print(f"{task:<5} {way:<24} cannot run: {row.failure}", flush=True)
                continue
            shown["gradients"] = compare(files(way), files(RESIDENT))
            if way in NOTES and self._bandwidth is None:
                shown["note"] = NOTES[way]
            shown["least_bytes_per_step"] = least
            shown["ratio_to_resident"] = statistics.median(row.seconds) / statistics.median(
                rows[RESIDENT]["seconds"]
            )
            print(f"{task:<5} {way:<24} {describe(shown, least)}", flush=True)
        self._bars(task, rows, least)

    def _bars(self, task: str, rows: dict[str, Any], least: int) -> None:
        way = NATIVE if NATIVE in rows else PYTHON
        mine = rows[way]
        if mine["failure"]:
            self._record.bar(f"{task}: {way} runs", 0, at_least=1)
            return
        record = self._record
        record.bar(f"{task}: time of a step / resident", mine["ratio_to_resident"])
        if self._bandwidth is not None:
            limit = limit_of(mine, statistics.median(rows[RESIDENT]["seconds"]), self._bandwidth)
            record.bar(f"{task}: time of a step / limit", statistics.median(mine["seconds"]) / limit)
        record.bar(f"{task}: gradients are right", "wrong" not in mine["gradients"], at_least=1)
        record.bar(f"{task}: bytes beyond the budget", mine["stats"]["overflow_bytes"], at_most=0)
        record.bar(
            f"{task}: engine's peak / budget", mine["stats"]["peak_bytes"] / self._job.budget, at_most=1
        )
        if least and way == NATIVE:
            record.bar(
                f"{task}: bytes moved a step / the least", mine["stats"]["bytes_moved_per_step"] / least
            )
        for name, row in rows.items():
            if name in (RESIDENT, NATIVE, PYTHON) or row["failure"] or "wrong" in row["gradients"]:
                continue
            ratio = statistics.median(row["seconds"]) / statistics.median(mine["seconds"])
            record.bar(f"{task}: time of {name} / {way}", ratio)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--size", help="default: 240MB, 1GB on a GPU")
    options.add_argument("--budget", help="default: a quarter of --size")
    options.add_argument("--prefetch", type=int, default=2)
    options.add_argument("--tokens", type=int, help="default: 64, 1024 on a GPU")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--rounds", type=int, help="processes of each baseline; default: 3, 1 on a GPU")
    options.add_argument("--rank", type=int, default=8)
    options.add_argument("--only", help="baselines, with commas between them; the resident always runs")
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.tiny:
        given.size, given.budget, given.tokens, given.steps = "6MB", "2MB", 8, 1
        given.rounds = 1
    cuda = given.device == "cuda"
    given.size = given.size or ("1GB" if cuda else "240MB")
    given.budget = given.budget or str(parse_size(given.size) // 4)
    given.tokens = given.tokens or (1024 if cuda else 64)
    given.rounds = given.rounds or (1 if cuda else 3)  # on a CPU, processes differ more than steps
    record = Record("train_cuda" if cuda else "train", given.tiny)
    config = config_for(parse_size(given.size), torch.float32)
    wanted = given.only.split(",") if given.only else list(BASELINES)
    baselines = [way for way in BASELINES if way == RESIDENT or way in wanted]
    if not native_available(given.device) and NATIVE in baselines:
        baselines[baselines.index(NATIVE)] = PYTHON
        baselines = list(dict.fromkeys(baselines))
    bandwidth = pinned_bandwidth(torch.device("cuda")) if cuda else None
    with (
        checkpoint_file(given.folder, config, torch.float32) as path,
        tempfile.TemporaryDirectory(dir=given.folder) as scratch,
    ):
        job = Job(
            way="",
            task="",
            checkpoint=str(path),
            config=dataclasses.asdict(config),
            budget=parse_size(given.budget),
            prefetch=given.prefetch,
            tokens=given.tokens,
            steps=given.steps,
            rank=given.rank,
            gradients="",
            device=given.device,
        )
        bench = Bench(record, job, baselines, Path(scratch), given.output, bandwidth, given.rounds)
        record.figures["pinned_bytes_per_second"] = bandwidth
        record.figures["model_bytes"], record.figures["budget"] = config.parameters * 4, job.budget
        for task in ("lora", "full"):
            bench.run(task, config.parameters * 4)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
