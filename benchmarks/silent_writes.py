"""The cost of seeing writes that bump no version, by the kernel's page tracking or by reading all bytes.

Each access to a weight that stays on the device looks for such writes, and finds none as a rule. A look
protects pages. The first write to a protected page faults, unless it was announced, as those of optimizers
are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn

import dynswap_ext
from common import Record, parser
from dynswap_ext._swap.state import session_of
from records import Sample


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--mebibytes", type=int, default=256)
    given = options.parse_args()
    record = Record("silent_writes", given.tiny)
    size, repeats = (1 << 20, 2) if given.tiny else (given.mebibytes << 20, 7)
    model = nn.Module()
    model.register_buffer("weight", torch.zeros(size // 4))
    master = model._buffers["weight"]
    assert master is not None
    target = torch.empty_like(master)
    handle = dynswap_ext.install(
        model, device="cpu", dtype=torch.bfloat16, budget=2 * size, provider="native"
    )
    session = session_of(model)
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
        session.expect_writes([master])
        write()

    def access() -> None:
        model.weight  # noqa: B018

    copy = measure("copy", lambda: target.copy_(master))
    read = measure("reading all of it (the least a hash takes)", lambda: master.view(torch.int64).sum())
    plain = measure("write, not watched or found before", write, write)
    if not handle.report().sampled_bytes:
        look = measure("look that finds nothing", access, access)
        faults = measure("write to protected pages", write, access)
        announced = measure("write that was announced", announce_and_write, access)
        record.bar("look / reading all of it", look / read, at_most=None if given.tiny else 0.1)
        record.bar("look / copy", look / copy, at_most=None if given.tiny else 0.1)
        record.bar("announced write / faults", announced / faults)
        record.bar("announced write / plain write", announced / plain)
    else:
        print("this kernel tracks no pages (Linux 6.7, userfaultfd): masters are sampled")
        record.bar("reading all of it / copy", read / copy)
    handle.uninstall()
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
