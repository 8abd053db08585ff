"""Ranks of one host: forks of a process that has imported torch, joined by torch.distributed (gloo)."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import children

_RANKS = """
import json, os, sys, traceback
import torch, torch.distributed as dist
from torch import nn
import dynswap_ext

count, store, *arguments = sys.argv[1:]
count = int(count)
told = {}  # what a rank tells the test

def work(rank):
    device, backend = "cpu", "gloo"
    if DEVICE != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        device, backend = f"{DEVICE}:{torch.accelerator.current_device_index()}", f"cpu:gloo,{DEVICE}:nccl"
        if "pretend_cuda" in sys.modules:
            pretend_cuda = sys.modules["pretend_cuda"]
            pretend_cuda.reset(rank, ("late", "early", "mixed")[rank % 3])
            backend = pretend_cuda.register_collectives()
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    namespace = dict(globals(), rank=rank, world=count, device=device, backend=backend)
    exec(compile(CODE, "<rank>", "exec"), namespace)
    dist.barrier()  # a rank that leaves while another still talks to it ends that one
    dist.destroy_process_group()

pids = []
for rank in range(count):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work(rank)
            status = 0
        except BaseException:
            traceback.print_exc()
        with open(f"{store}.{rank}", "w") as file:
            json.dump(told, file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    pids.append(pid)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
sys.exit(sum(end != (-9 if rank in KILLED else 0) for rank, end in enumerate(ends)))
"""


def run(
    code: str,
    count: int,
    folder: Path,
    *arguments: object,
    device_type: str = "cpu",
    killed: Collection[int] = (),
    timeout: float = 120,
) -> list[dict[str, Any]]:
    """Run the code in `count` processes, each as `rank` of `world`, and return what each has put into `told`.

    The code finds the `arguments` as texts, the `device` of its rank, which is of `device_type`, and the
    `backend` that has collectives on it. A rank that was killed has told nothing. The test fails if a rank
    does, or if one that is to be `killed` is not. Each run needs a folder of its own.
    """
    store = folder / "store"
    code = f"CODE, KILLED, DEVICE = {code!r}, {list(killed)!r}, {device_type!r}\n{_RANKS}"
    done = children.run(code, count, store, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [Path(f"{store}.{rank}") for rank in range(count)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in told]
