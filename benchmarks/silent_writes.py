"""What it costs to see writes that bump no version: the kernel's page tracking beside reading all bytes.

A look that finds nothing is part of each access; protecting follows each write that was found; a write to a
protected page faults once, unless it was announced, as optimizers' steps are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

import torch

from common import Record, Sample, parser
from dynswap_ext._python.memory_watch import MemoryWatch, is_sampled


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--mebibytes", type=int, default=256)
    given = options.parse_args()
    record = Record("silent_writes", given.tiny)
    size, repeats = (1 << 20, 2) if given.tiny else (given.mebibytes << 20, 7)
    master = torch.zeros(size // 4)
    target = torch.empty_like(master)
    watch = MemoryWatch(master)
    gib = (1 << 30) / size

    def measure(name: str, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        seconds = []
        for _ in range(repeats + 1):
            before()
            begin = perf_counter()
            call()
            seconds.append((perf_counter() - begin) * gib)
        sample = Sample.of(seconds[1:])
        record.figures[name] = sample.__dict__
        spread = f"{sample.low * 1e3:.3f} .. {sample.high * 1e3:.3f}"
        print(f"{name:<44} {sample.median * 1e3:9.3f} ms/GiB ({spread})")
        return sample.median

    def write() -> None:
        master.fill_(1.0)

    def announce_and_write() -> None:
        watch.expect_writes()
        write()

    def settle() -> None:
        watch.writes()

    copy = measure("copy", lambda: target.copy_(master))
    read = measure("reading all of it (the least a hash takes)", lambda: master.view(torch.int64).sum())
    plain = measure("write, not watched or found before", write, write)
    if not is_sampled(master):
        look = measure("look that finds nothing", settle, settle)
        found = measure("look that finds all written, and protects", settle, write)
        faults = measure("write to protected pages", write, settle)
        announced = measure("write that was announced", announce_and_write, settle)
        record.bar("look / reading all of it", look / read, at_most=None if given.tiny else 0.1)
        record.bar("look / copy", look / copy, at_most=None if given.tiny else 0.1)
        record.bar("announced write and protecting / faults", (announced + found) / faults)
        record.bar("announced write / plain write", announced / plain)
    else:
        print("this kernel tracks no pages (Linux 6.7, userfaultfd): masters are sampled")
        record.bar("reading all of it / copy", read / copy)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
