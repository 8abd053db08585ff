"""The bandwidth of copies between RAM and the device, in both directions, by size.

pinned      Memory that torch's allocator has page-locked.
registered  Ordinary memory that is page-locked in place, as dynswap does with masters.
pageable    Ordinary memory; the driver copies through buffers of its own.
both ways   Pinned, to the device and from it at the same time, on two streams.

On the CPU (`--device cpu`, which proves that the script works) copies go from RAM to RAM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common import Record, parser
from dynswap_ext._util.clock import timing_event
from dynswap_ext._util.memory import format_bytes
from records import Sample

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
TO, FROM, BOTH = "to the device", "from the device", "both ways"
_BYTES_A_SAMPLE = 128 << 20
_MOST_COPIES = 256


@contextmanager
def host_memory(kind: str, size: int) -> Iterator[Tensor]:
    """Yield a tensor of `size` bytes in RAM of the given kind.

    Registered memory is unregistered afterwards.
    """
    if kind == "pinned":
        yield torch.ones(size, dtype=torch.uint8).pin_memory()
        return
    tensor = torch.ones(size, dtype=torch.uint8)
    if kind != "registered":
        yield tensor
        return
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(tensor.data_ptr(), size, 0))
    if status:
        raise RuntimeError(f"the driver refuses to page-lock {format_bytes(size)} in place: error {status}")
    try:
        yield tensor
    finally:
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(tensor.data_ptr())


def seconds_of_copies(copy: Callable[[], object], copies: int, repeats: int, cuda: bool) -> Sample:
    """Return the seconds of one copy, from runs of `copies` in a row."""
    values = []
    for number in range(repeats + 1):
        if cuda:
            begin, end = timing_event(), timing_event()
            begin.record()
            for _ in range(copies):
                copy()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            for _ in range(copies):
                copy()
            seconds = time.perf_counter() - start
        if number:  # the first is warm-up
            values.append(seconds / copies)
    return Sample.of(values)


def both_ways(host: Tensor, device: Tensor, copies: int, repeats: int) -> Sample:
    """Return the seconds of one copy to the device and one from it, at the same time."""
    other_host = torch.empty_like(host).pin_memory()
    other = torch.empty_like(device)
    back = torch.cuda.Stream(device=device.device)

    def run() -> None:
        back.wait_stream(torch.cuda.current_stream())
        for _ in range(copies):
            device.copy_(host, non_blocking=True)
            with torch.cuda.stream(back):
                other_host.copy_(other, non_blocking=True)
        torch.cuda.current_stream().wait_stream(back)

    sample = seconds_of_copies(run, 1, repeats, cuda=True)
    return Sample(sample.median / copies, sample.low / copies, sample.high / copies, sample.n)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--repeats", type=int, default=7)
    given = options.parse_args()
    device = torch.device(given.device)
    cuda = device.type == "cuda"
    sizes, repeats = (SIZES[:2], 2) if given.tiny else (SIZES, given.repeats)
    record = Record("bandwidth" if cuda else "bandwidth_cpu", given.tiny)
    rates: dict[tuple[str, str, int], float] = {}

    def note(kind: str, direction: str, size: int, sample: Sample) -> None:
        moved = size * (2 if direction == BOTH else 1)
        rate = rates[kind, direction, size] = moved / sample.median
        name = f"{kind}, {direction}, {format_bytes(size)}"
        record.figures[name] = {**sample.__dict__, "bytes_per_second": rate}
        print(f"{name:<44} {rate / 1e9:8.2f} GB/s", flush=True)

    for size in sizes:
        copies = max(1, min(_MOST_COPIES, _BYTES_A_SAMPLE // size))
        there = torch.ones(size, dtype=torch.uint8, device=device)
        for kind in ("pinned", "registered", "pageable") if cuda else ("pageable",):
            with host_memory(kind, size) as here:
                for direction, target, source in ((TO, there, here), (FROM, here, there)):
                    sample = seconds_of_copies(
                        lambda target=target, source=source: target.copy_(source, non_blocking=True),
                        copies,
                        repeats,
                        cuda,
                    )
                    note(kind, direction, size, sample)
                if kind == "pinned":
                    note(kind, BOTH, size, both_ways(here, there, copies, repeats))
        record.write(given.output)
    largest = sizes[-1]
    best = "pinned" if cuda else "pageable"
    for direction in (TO, FROM, BOTH) if cuda else (TO, FROM):
        record.bar(f"{best}, {direction}: GB/s", rates[best, direction, largest] / 1e9)
    if cuda:
        for direction in (TO, FROM):
            pinned = rates["pinned", direction, largest]
            record.bar(
                f"registered in place / pinned, {direction}",
                rates["registered", direction, largest] / pinned,
                at_least=0.95,
            )
            record.bar(f"pageable / pinned, {direction}", rates["pageable", direction, largest] / pinned)
        enough = next(size for size in sizes if rates[best, TO, size] >= 0.9 * rates[best, TO, largest])
        record.bar("smallest copy at 90 % of the full rate, MiB", enough / 2**20)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
