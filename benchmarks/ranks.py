"""What several ranks of a host take of its RAM for one model: `share_masters`, and a mapped checkpoint.

A decoder of frozen weights, installed on the CPU with a budget of an eighth of it, in four processes that
torch.distributed joins. Its weights are loaded into RAM by every rank, or by the first one while the others
have them on the meta device, or mapped by all from a file.

host RAM       The memory of all ranks (PSS) after two passes, less what they had before the model and less
               their devices', divided by the bytes of the weights. "apart" is without share_masters. The
               "seconds" of each row are those of share_masters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import dynswap_ext
from common import Record, parser
from disk import pss
from dynswap_ext import checkpoint
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, checkpoint_file, config_for

PLACES = ("RAM", "meta", "file")


def work(job: argparse.Namespace) -> dict[str, Any]:
    """One rank's work."""
    config = DecoderConfig(**json.loads(job.config))
    torch.set_num_threads(1)
    tokens = torch.randint(config.vocabulary, (1, 16), generator=torch.Generator().manual_seed(1))
    small = dataclasses.replace(config, layers=1, vocabulary=64)
    checkpoint.init_empty(lambda: Decoder(small))  # what torch imports for the meta device takes 70 MiB
    with torch.inference_mode():
        Decoder(small)(tokens % 64)
    distributed.init_process_group(
        "gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.ranks
    )
    distributed.barrier()
    before = pss(os.getpid())

    def make() -> Decoder:
        return Decoder(config).bfloat16().requires_grad_(False)

    if job.place == "meta" and job.rank > 0:
        model = checkpoint.init_empty(make)
    else:
        model = checkpoint.load(make, job.path).requires_grad_(False)
        if job.place != "file":
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
    distributed.barrier()
    begin = time.perf_counter()
    if job.share:
        dynswap_ext.share_masters(model)
    seconds = time.perf_counter() - begin
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    handle = dynswap_ext.install(model, device="cpu", budget=nbytes // 8)
    with torch.inference_mode():
        for _ in range(2):
            output = model(tokens)
    distributed.barrier()
    took = pss(os.getpid()) - before
    distributed.barrier()  # all are there while each looks
    return {
        "took": took,
        "device": handle.stats().peak_bytes,
        "weights": nbytes,
        "seconds": seconds,
        "output": float(output.double().abs().sum()),
    }


def ranks(count: int, path: Path, config: DecoderConfig, place: str, *, share: bool) -> list[dict[str, Any]]:
    """The work of all ranks, each a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"path": path, "place": place, "ranks": count, "store": f"{folder}/store"}
        given = [f"--{name}={value}" for name, value in job.items()]
        given += [f"--config={json.dumps(dataclasses.asdict(config))}", *(["--share"] if share else [])]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, *given, f"--rank={rank}"], stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        printed = [each.communicate()[0] for each in started]
    if any(each.returncode for each in started):
        raise SystemExit(f"a rank with the model in {place} does not run")
    return [json.loads(each) for each in printed]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="1GiB")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on a disk")
    for name in ("rank", "place", "path", "store", "config", "share"):  # used between the processes
        options.add_argument(f"--{name}", **_OF_RANK.get(name, {}), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank is not None:
        print(json.dumps(work(given)), flush=True)
        return 0
    if given.tiny:
        given.size, given.ranks = "24MB", 2
    record = Record("ranks", given.tiny)
    config = config_for(parse_size(given.size), torch.bfloat16)
    outputs = set()
    with checkpoint_file(given.folder, config, torch.bfloat16) as path:
        for place, share in (("RAM", False), *((place, True) for place in PLACES)):
            rows = ranks(given.ranks, path, config, place, share=share)
            outputs |= {row["output"] for row in rows}
            name = place if share else "RAM, apart"
            record.figures[name] = rows
            host = sum(row["took"] - row["device"] for row in rows) / rows[0]["weights"]
            bound = 1.15 if share and rows[0]["weights"] > 1 << 28 else None
            record.bar(f"{name}: host RAM of all ranks / weights", host, at_most=bound)
    record.bar("outputs that there are", float(len(outputs)), at_most=1.0)
    return record.finish(given.output)


_OF_RANK: dict[str, dict[str, Any]] = {"rank": {"type": int}, "share": {"action": "store_true"}}

if __name__ == "__main__":
    raise SystemExit(main())
