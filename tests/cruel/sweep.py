"""Runs random programs and scenarios on the pretend device, under many seeds and orders.

    python tests/cruel/sweep.py --seeds 200
    python tests/cruel/sweep.py --first 17 --seeds 1 --order late --program a_ring_goes_round

Prints the seeds that are done. For a failure, it prints the seed, order and program, what differed, and the
command that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time

import paths  # noqa: F401
import pretend_cuda


def main() -> int:
    parser = argparse.ArgumentParser(description="random programs on the pretend device")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--order", choices=("late", "early", "mixed"), help="default: each")
    parser.add_argument("--program", help="default: each")
    options = parser.parse_args()
    pretend_cuda.activate()
    from programs import each_run, run
    from world import ORDERS, prepare

    prepare()
    orders = (options.order,) if options.order else ORDERS
    begun, runs, compared, failures = time.monotonic(), 0, 0, 0
    for seed in range(options.first, options.first + options.seeds):
        for name, order in each_run(orders, options.program):
            world = run(name, seed, order)
            runs, compared = runs + 1, compared + world.made
            if not world.failed:
                continue
            failures += 1
            print(
                f"\nFAILED: seed {seed}, order {order}, program {name}: {len(world.failed)} of {world.made}"
            )
            for what in world.failed[:5]:
                print(f"  {what}")
            print(f"  again: python {sys.argv[0]} --first {seed} --seeds 1 --order {order} --program {name}")
        if (seed + 1 - options.first) % 10 == 0 or seed + 1 == options.first + options.seeds:
            done, seconds = seed + 1 - options.first, time.monotonic() - begun
            print(
                f"{done} seeds, {runs} runs, {compared} comparisons, {failures} failures, {seconds:.0f} s",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
