"""The RAM of the host that an installed model takes besides its own bytes, and a container of that size.

A decoder in bfloat16 computes in float32 on the CPU. The device's memory is RAM there, too, so the budget's
part is subtracted. Weights are in a mapped file, or in RAM. Each case has a process of its own.

memory         The process's memory (PSS) after four passes, less what it had before the model and less the
               device's: divided by the bytes of the weights.
container      The same in a control group whose size is that of `host_budget`, the device's memory, the
               program's own, and a sixteenth of the weights. It takes root to make one. Recorded is whether
               it ends as it should, with the same output, and the most that the group held.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import dynswap_ext
from common import Record, parser
from disk import pss
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, checkpoint_file, config_for

PLACES = ("file", "RAM")


@dataclass(frozen=True)
class Job:
    """The work of one process: where the weights are, the model, and the budgets."""

    place: str
    config: dict[str, int]
    path: str
    budget: int
    host_budget: int | str
    group: str = ""  #: the folder of a control group, which the process enters first; empty: none


@dataclass(frozen=True)
class Row:
    """The measurements of one process, in bytes."""

    program: int
    weights: int
    device: int
    after: int
    told: int  #: the bytes that the install itself reports
    output: float

    @property
    def host(self) -> int:
        """Return the bytes that the model took besides the device's memory."""
        return self.after - self.program - self.device


def run(job: Job) -> Row:
    """Do the work of one process, and return its measurements."""
    if job.group:
        (Path(job.group) / "cgroup.procs").write_text(str(os.getpid()))
    config = DecoderConfig(**job.config)
    tokens = torch.randint(config.vocabulary, (1, 16), generator=torch.Generator().manual_seed(1))
    small = dataclasses.replace(config, layers=1, vocabulary=64)
    checkpoint.init_empty(lambda: Decoder(small))  # what torch imports for the meta device takes 70 MiB
    with torch.inference_mode():  # loads torch's code and starts its threads
        Decoder(small)(tokens % 64)
    program = pss(os.getpid())
    model = checkpoint.load(lambda: Decoder(config).bfloat16(), job.path).eval()
    if job.place == "RAM":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    drop_file_cache(Path(job.path))
    handle = dynswap_ext.install(
        model, device="cpu", dtype=torch.float32, budget=job.budget, host_budget=job.host_budget
    )
    with torch.inference_mode():
        for _ in range(4):
            output = model(tokens)
    host = handle.report().host
    assert host is not None
    return Row(
        program=program,
        weights=host.weights,
        device=handle.stats().peak_bytes,
        after=pss(os.getpid()),
        told=host.total,
        output=float(output.double().abs().sum()),
    )


def apart(job: Job) -> Row | None:
    """Run a job in a process of its own. Return None if it did not end as it should."""
    command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return Row(**json.loads(done.stdout)) if done.returncode == 0 else None


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """Yield a control group, of either version, that may hold `limit` bytes.

    Yield None if none can be made.
    """
    for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"dynswap-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    yield None


def most_held(group: Path) -> int:
    """Return the most bytes that the group held at one time, including its page cache."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return int(next(group / name for name in names if (group / name).exists()).read_text())


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="1GiB")
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on a disk")
    options.add_argument("--job", help="used between the processes")
    given = options.parse_args()
    if given.job:
        print(json.dumps(dataclasses.asdict(run(Job(**json.loads(given.job))))), flush=True)
        return 0
    if given.tiny:
        given.size = "24MB"
    record = Record("host_memory", given.tiny)
    config = config_for(parse_size(given.size), torch.bfloat16)
    with checkpoint_file(given.folder, config, torch.bfloat16) as path:
        for place in PLACES:
            job = Job(
                place=place,
                config=dataclasses.asdict(config),
                path=str(path),
                budget=path.stat().st_size // 2,
                host_budget="auto",
            )
            free = apart(job)
            if free is None:
                raise SystemExit(f"the model in {place} does not run")
            figures = {"free": dataclasses.asdict(free)}
            record.figures[place] = figures
            beside = free.host / free.weights
            record.bar(
                f"weights in {place}: host RAM / weights",
                beside,
                at_most=1.05 if free.weights > 1 << 28 else None,
            )
            slack = free.weights // 16
            host_budget = (free.weights if place == "RAM" else 0) + slack
            limit = free.program + free.device + host_budget + slack
            with control_group(limit) as group:
                if group is None:
                    print("no control group can be made here", flush=True)
                    continue
                within = apart(dataclasses.replace(job, host_budget=host_budget, group=str(group)))
                figures["container"] = {"limit": limit, "most_held": most_held(group)}
                print(f"{format_bytes(limit)}: held {format_bytes(most_held(group))}", flush=True)
            ended = within is not None and within.output == free.output
            if within is not None:
                figures["container"] |= dataclasses.asdict(within)
            record.bar(f"weights in {place}: ends in a container of that size", float(ended), at_least=1.0)
            if within is not None:
                record.bar(
                    f"weights in {place}: RAM as the install tells it / host_budget",
                    within.told / host_budget,
                    at_most=1.0,
                )
    return record.finish(given.output)


if __name__ == "__main__":
    raise SystemExit(main())
