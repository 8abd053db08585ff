"""A model on disk with a budget: the time of a pass, compared with the disk and with the resident model.

A decoder of 1.5 GB has masters that are mapped from a safetensors file, and a budget of 384 MiB. Each
baseline has a process of its own. There are three questions:

read-bound     An input of one token. Bytes moved / time of a pass, against `dd iflag=direct bs=16M` of the
               same file; readings of dd and passes alternate, and medians are compared.
compute-bound  An input that computes for longer than the weights take to arrive. Time of a pass against
               the resident model's.
memory         Peak resident set over the start of the run, in both.

On a GPU (`--device cuda`) weights are copied from the disk through pinned buffers to the device. Peak memory
is the device's, the time of the compute-bound pass is compared with max(resident, bytes / dd), and one more
baseline has its masters in RAM, against the bandwidth of copies from pinned memory.

None of the file is in the page cache when a pass begins. The bytes that storage delivered (/proc/self/io)
are recorded together with those that the engine says it moved.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from common import Record, dd, native_available, parser
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import cache_folder, checkpoint_file, config_for
from dynswap_ext.demo.run import INSTALLED, RESIDENT, Job, Outcome, run_apart
from dynswap_ext.planning.rates import pinned_bandwidth


class Bench:
    """Runs baselines over one checkpoint and keeps their measurements."""

    def __init__(self, job: Job, record: Record, output: Path | None) -> None:
        self._job, self._record, self._output = job, record, output

    def run(self, name: str, baseline: str, **changes: Any) -> Outcome:
        outcome = run_apart(dataclasses.replace(self._job, baseline=baseline, **changes))
        self._record.figures.setdefault(name, []).append(dataclasses.asdict(outcome))
        print(
            f"{name:<28} {statistics.median(outcome.seconds):8.3f} s a pass, peak {outcome.peak_bytes} bytes",
            flush=True,
        )
        self._record.write(self._output)
        return outcome

    def from_memory(self, bandwidth: float, native: bool) -> None:
        """Measure masters in RAM with an input of one token, which the bus limits."""
        outcome = self.run("from RAM", INSTALLED, tokens=1, in_memory=True)
        rate = (outcome.moved_bytes_per_pass or 0) / statistics.median(outcome.seconds)
        self._record.figures["pinned_bytes_per_second"] = bandwidth
        name = "from RAM: bytes a second / copies from pinned memory"
        self._record.bar(name, rate / bandwidth, at_least=0.9 if native else None)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="1.5GB")
    options.add_argument("--budget", default="384MiB")
    options.add_argument("--prefetch", type=int, default=2)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument(
        "--tokens", type=int, help="of the compute-bound input (default: 1024, 16384 on a GPU)"
    )
    options.add_argument("--passes", type=int, default=5)
    options.add_argument("--rounds", type=int, default=3, help="of dd and passes in turn")
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.tiny:
        given.size, given.budget, given.tokens, given.passes, given.rounds = "24MB", "12MB", 8, 2, 1
    cuda = given.device == "cuda"
    given.tokens = given.tokens or (16384 if cuda else 1024)
    record = Record("stream_cuda" if cuda else "stream", given.tiny)
    config = config_for(parse_size(given.size), torch.float32)
    budget = parse_size(given.budget)
    native = native_available(given.device)

    with checkpoint_file(given.folder, config, torch.float32) as path:
        job = Job(
            baseline="",
            checkpoint=path,
            config=config,
            device=given.device,
            passes=given.passes,
            budget=budget,
            prefetch=given.prefetch,
        )
        bench = Bench(job, record, given.output)

        rates, readings, runs = [], [dd(path)], []
        for _ in range(given.rounds):
            outcome = bench.run("read-bound", INSTALLED, tokens=1)
            runs.append(outcome)
            rates.append((outcome.moved_bytes_per_pass or 0) / statistics.median(outcome.seconds))
            readings.append(dd(path))
        record.figures["dd_bytes_per_second"] = readings
        record.figures["bytes_per_second"] = rates
        record.bar(
            "read-bound: bytes a second / dd iflag=direct",
            statistics.median(rates) / statistics.median(readings),
            at_least=0.85 if native else None,
        )

        resident = bench.run("compute-bound, resident", RESIDENT, tokens=given.tokens)
        installed = bench.run("compute-bound", INSTALLED, tokens=given.tokens)
        both = resident.seconds
        if not given.tiny:  # before and after, as the machine's speed may change
            both = both + bench.run("compute-bound, resident", RESIDENT, tokens=given.tokens).seconds
        record.bar(
            "compute-bound: time of a pass / resident",
            statistics.median(installed.seconds) / statistics.median(both),
            at_most=1.05 if native and not cuda else None,
        )
        equal = installed.digest == resident.digest
        record.bar("compute-bound: outputs equal to the bit", equal, at_least=1)
        runs.append(installed)
        if cuda:
            limit = max(
                statistics.median(both),
                (installed.moved_bytes_per_pass or 0) / statistics.median(readings),
            )
            record.bar("compute-bound: time of a pass / limit", statistics.median(installed.seconds) / limit)
            bench.from_memory(pinned_bandwidth(torch.device("cuda")), native)
        record.bar(
            "peak allocated on the device, MiB" if cuda else "peak RSS over the start of the run, MiB",
            max(outcome.peak_bytes or 0 for outcome in runs) / 2**20,
            at_most=448 if native and not cuda and budget == 384 << 20 else None,
        )
        if native and not given.tiny and not cuda:
            bench.run("read-bound, pure Python", INSTALLED, tokens=1, provider="python")
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
