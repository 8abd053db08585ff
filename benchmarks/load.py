"""The time until a checkpoint of 4 GB is a model, and the memory that it takes.

The model is a float32 decoder in a safetensors file. Each baseline has a process of its own, in which the
libraries' code has run once on a small file. The large file is not in the page cache.

onto a skeleton  `checkpoint.load(skeleton, path)`, with a skeleton on the meta device that was made before.
from a factory   `checkpoint.load(lambda: Model(config), path)`, including the time to make the skeleton.
onto the device  With `--device cuda`: from the file until every weight is on the GPU, for all of them.
others           PyTorch's recipe with `torch.load(mmap=True)` and `assign=True`, and safetensors' load_file.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from common import Record, dd, parser, run_apart
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.peak_memory import PeakMemory, disk_bytes_read
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import (
    Decoder,
    DecoderConfig,
    cache_folder,
    checkpoint_file,
    config_for,
    write_random,
)

SKELETON, FACTORY = "load onto a skeleton", "load from a factory"
WAYS = (SKELETON, FACTORY, "torch.load(mmap=True), assign", "safetensors load_file, assign")


@dataclass(frozen=True)
class Job:
    """The work of one process: how it loads the model, from which files, and to which device."""

    way: str
    config: dict[str, int]
    safetensors: str
    torch: str
    device: str = "cpu"


def skeleton(config: DecoderConfig) -> Any:
    """Return the model on the meta device."""
    return checkpoint.init_empty(lambda: Decoder(config))


def load(way: str, config: DecoderConfig, model: nn.Module, job: Job) -> nn.Module:
    if way == SKELETON:
        return checkpoint.load(model, job.safetensors, device=job.device)
    if way == FACTORY:
        return checkpoint.load(lambda: Decoder(config), job.safetensors, device=job.device)
    if "safetensors" in way:
        state = load_file(job.safetensors, device=job.device)
    else:
        state = torch.load(job.torch, mmap=True)
    model.load_state_dict(state, assign=True, strict=False)  # the file has the tied head once
    model.head.weight = model.embedding.weight
    for parameter in model.parameters():
        parameter.data = parameter.data.to(job.device)
    return model


def run(job: Job) -> dict[str, Any]:
    """Do the work of one process, and return its measurements."""
    config = DecoderConfig(**job.config)
    small = dataclasses.replace(config, layers=1, vocabulary=64)
    with tempfile.TemporaryDirectory() as folder:
        warm_up = dataclasses.replace(job, safetensors=f"{folder}/w.safetensors", torch=f"{folder}/w.pt")
        write_random(Path(warm_up.safetensors), skeleton(small), torch.float32)
        torch.save(load_file(warm_up.safetensors), warm_up.torch)
        load(job.way, small, skeleton(small), warm_up)
    model = skeleton(config) if job.way != FACTORY else nn.Module()
    for path in (job.safetensors, job.torch):
        drop_file_cache(Path(path))
    memory, read = PeakMemory(), disk_bytes_read()
    start = time.perf_counter()
    model = load(job.way, config, model, job)
    if job.device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert not next(model.parameters()).is_meta
    return {
        "seconds": seconds,
        "rss_bytes": memory.more(),
        "disk_bytes": disk_bytes_read() - read,
        "tensors": len(list(model.parameters())),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="4GB")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.tiny:
        given.size, given.rounds = "24MB", 1
    cuda = given.device == "cuda"
    record = Record("load_cuda" if cuda else "load", given.tiny)
    config = config_for(parse_size(given.size), torch.float32)
    with (
        checkpoint_file(given.folder, config, torch.float32) as path,
        tempfile.TemporaryDirectory(dir=given.folder) as scratch,
    ):
        pickled = Path(scratch) / "model.pt"
        torch.save(dict(checkpoint.load(lambda: Decoder(config), path).state_dict()), pickled)
        job = Job("", dataclasses.asdict(config), str(path), str(pickled), given.device)
        rows: dict[str, list[dict[str, Any]]] = {}
        record.figures |= {"file_bytes": path.stat().st_size, "rows": rows}
        for _ in range(given.rounds):
            for way in WAYS:
                row = run_apart(run, dataclasses.replace(job, way=way))
                if "failure" in row:
                    raise SystemExit(f"{way}: {row['failure']}")
                rows.setdefault(way, []).append(row)
                print(f"{way}: {row['seconds']:.3f} s", flush=True)
                record.write(given.output)
        file_bytes = record.figures["file_bytes"]
        if cuda:
            record.figures["dd_bytes_per_second"] = reading = dd(path)
            record.bar("dd iflag=direct: GB/s", reading / 1e9)
    for way in WAYS:
        seconds = statistics.median(row["seconds"] for row in rows[way])
        memory = max(row["rss_bytes"] or 0 for row in rows[way]) / 2**20
        ours = way == SKELETON and not cuda  # this reads no weights
        record.bar(f"{way}: ms", seconds * 1e3, at_most=50 if ours else None)
        if cuda:
            record.bar(f"{way}: GB/s", file_bytes / seconds / 1e9)
        record.bar(f"{way}: RSS + MiB", memory, at_most=20 if ours else None)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
