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
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    namespace = dict(globals(), rank=rank, world=count)
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
    killed: Collection[int] = (),
    timeout: float = 120,
) -> list[dict[str, Any]]:
    """Run the code in `count` processes, each as `rank` of `world`, and return what each has put into `told`.

    The code finds the `arguments` as texts. The test fails if a rank does, or if one that is to be `killed`
    is not. Each run needs a folder of its own.
    """
    store = folder / "store"
    code = f"CODE, KILLED = {code!r}, {list(killed)!r}\n{_RANKS}"
    done = children.run(code, count, store, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(Path(f"{store}.{rank}").read_text()) for rank in range(count)]
