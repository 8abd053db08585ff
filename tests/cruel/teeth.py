"""Checks that each protection is needed: without it, programs that install a model fail. Prints a table.

    python tests/cruel/teeth.py --seeds 5
    python tests/cruel/teeth.py --only gradient_made --seeds 20

With --enough, a protection's runs end with the first that fails, as in CI. The status is 1 if a protection
can be taken away unnoticed, or if programs fail with all in place.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass

import paths  # noqa: F401
import pretend_cuda

#: Protections whose absence no program can see here, and why.
NOT_SEEN = {
    "copy_after_copy": "the backend has one copy stream, whose copies are in order by themselves",
    "arrived_before_inherited": "the backend ends all copies that have been issued before it closes",
    "lease_keeps_resident": "no residents give way here; seen by tests/cpp/test_giving_way_threads.cpp",
    "saved_back_after_left": "the streams that saved have waited; seen by tests/cpp/test_protections.cpp",
    "changed_not_taken_back": "no residents give way here; seen by tests/cpp/test_giving_way_threads.cpp",
}
#: Seconds that one run may take before it counts as hanging.
PATIENCE = 60.0


@dataclass
class Bite:
    """The results of the runs without one protection."""

    protection: str
    runs: int = 0
    failing_runs: int = 0
    compared: int = 0
    failed: int = 0
    first: str = ""
    ended: str = ""  #: how the process ended, if it crashed or was killed


def bites(protection: str, seeds: int, enough: bool) -> Bite:
    """Run the programs without a protection, in a child process that may crash."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            _run_without(protection, seeds, enough, write)
        finally:
            os._exit(0)
    os.close(write)
    bite, rest = Bite(protection), b""
    while True:
        if not select.select([read], [], [], PATIENCE)[0]:
            bite.ended = "a run hangs"
            os.kill(child, signal.SIGKILL)
            break
        data = os.read(read, 65536)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        if lines:
            bite = Bite(**json.loads(lines[-1]))
    os.close(read)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and not bite.ended:
        bite.ended = signal.Signals(os.WTERMSIG(status)).name
    return bite


def _run_without(protection: str, seeds: int, enough: bool, pipe: int) -> None:
    from programs import each_run, run
    from world import ORDERS, prepare

    prepare()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what wrong programs complain about
    bite = Bite(protection)
    with pretend_cuda.without(protection):
        for seed in range(1, seeds + 1):
            for name, order in each_run(ORDERS):
                world = run(name, seed, order)
                bite.runs += 1
                bite.compared += world.made
                if world.failed:
                    bite.failing_runs += 1
                    bite.failed += len(world.failed)
                    bite.first = bite.first or f"{name}, {order}, seed {seed}: {world.failed[0]}"
                os.write(pipe, json.dumps(asdict(bite)).encode() + b"\n")
                if world.failed and enough:
                    return


def line(bite: Bite) -> str:
    count = f"{bite.failed} of {bite.compared}"
    runs = f"{bite.failing_runs} of {bite.runs}"
    end = f" [{bite.ended}]" if bite.ended else ""
    return f"{bite.protection:<24} {count:>16} {runs:>12}  {bite.first[:110]}{end}"


def main() -> int:
    parser = argparse.ArgumentParser(description="programs without one protection at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--enough", action="store_true", help="one failing run of each is enough")
    parser.add_argument("--only", action="append", help="these protections")
    options = parser.parse_args()
    pretend_cuda.activate(mutants=True)
    import torch  # noqa: F401 - once, before the processes are forked

    import dynswap_ext  # noqa: F401
    from dynswap_ext import _C  # noqa: F401

    begun, unnoticed = time.monotonic(), []
    print(f"{'without':<24} {'comparisons':>16} {'runs':>12}  the first that failed", flush=True)
    for protection in options.only or ["none", *pretend_cuda.protections()]:
        bite = bites(protection, options.seeds, options.enough and protection != "none")
        print(line(bite), flush=True)
        bitten = bool(bite.failed or bite.ended)
        if bitten == (protection == "none" or protection in NOT_SEEN):
            unnoticed.append(protection)
    for protection, why in NOT_SEEN.items():
        print(f"{protection} is not seen here: {why}")
    print(f"{time.monotonic() - begun:.0f} s; not as expected: {', '.join(unnoticed) or 'none'}")
    return int(bool(unnoticed))


if __name__ == "__main__":
    sys.exit(main())
