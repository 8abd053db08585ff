"""`dynswap convert` of an fp32 checkpoint to bf16: its speed compared with the disk, and its memory.

The source is a safetensors file of --size, none of it in the page cache. Rounds alternate between

raw sequential   Read all of the source, then write as many bytes as the result has, and wait for the disk.
raw overlapped   The same reads and writes at the same time, by as many threads as convert has: the stricter.
convert          The command in a process of its own, without the time of its imports: it reads, casts,
                 writes, reads back what it wrote, and compares checksums. So it moves a third more bytes than
                 raw does. If the disk is the bottleneck, at most about 0.75 can be reached.

All of them bypass the page cache, in the same blocks. Peak memory is VmHWM of the process of convert, with
the imports of torch and of the command. What importing torch takes is recorded too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Record, parser
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext._util.units import parse_size
from dynswap_ext.demo.model import cache_folder

_BLOCK = 4 << 20
_THREADS = 4

#: A program that runs the command and times it without its imports.
_CONVERT = """
import json, sys, time
from pathlib import Path
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
import torch
imported = peak()
import rich.progress
from dynswap_ext import checkpoint, cli
begin = time.perf_counter()
status = cli.main(["convert", sys.argv[1], sys.argv[2], "--dtype", "bf16", "--overwrite"])
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "peak": peak(), "torch": imported}))
sys.exit(status)
"""


def make_source(path: Path, size: int) -> None:
    """Write layers of fp32 weights. All have the same random block, as their values do not matter."""
    layers = max(1, size // (64 << 20))
    columns = size // layers // 4 // 1024
    nbytes = columns * 1024 * 4
    listed = {
        f"layers.{number}.weight": {
            "dtype": "F32",
            "shape": [1024, columns],
            "data_offsets": [number * nbytes, (number + 1) * nbytes],
        }
        for number in range(layers)
    }
    header = json.dumps(listed).encode()
    import torch

    block = torch.randn(1024, columns).numpy().tobytes()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(layers):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def raw(source: Path, target: Path, *, overlapped: bool) -> float:
    """Return the seconds of reading the source and writing half as many bytes."""
    drop_file_cache(source)
    size = source.stat().st_size
    count = math.ceil(size / _BLOCK)
    begin = time.perf_counter()
    reading = os.open(source, os.O_RDONLY | os.O_DIRECT)
    writing = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o666)
    os.posix_fallocate(writing, 0, (count + 1) // 2 * _BLOCK)
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(_THREADS)]

    def read(buffer: mmap.mmap, block: int) -> None:
        os.preadv(reading, [buffer], block * _BLOCK)

    def write(buffer: mmap.mmap, block: int) -> None:
        os.pwritev(writing, [buffer], block * _BLOCK)

    def both(number: int) -> None:
        for block in range(number, (count + 1) // 2, _THREADS):
            read(buffers[number], 2 * block)
            read(buffers[number], 2 * block + 1)
            write(buffers[number], block)

    def reads(number: int) -> None:
        for block in range(number, count, _THREADS):
            read(buffers[number], block)

    def writes(number: int) -> None:
        for block in range(number, (count + 1) // 2, _THREADS):
            write(buffers[number], block)

    with ThreadPoolExecutor(_THREADS) as pool:
        for work in (both,) if overlapped else (reads, writes):
            list(pool.map(work, range(_THREADS)))
    os.fsync(writing)
    os.close(reading)
    os.close(writing)
    return time.perf_counter() - begin


def converted(source: Path, target: Path) -> dict[str, float]:
    """Return the measurements of one conversion in a process of its own."""
    drop_file_cache(source)
    command = [sys.executable, "-c", _CONVERT, str(source), str(target)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--size", default="4GB")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.tiny:
        given.size, given.rounds = "16MB", 1
    record = Record("convert", given.tiny)
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        source, target = Path(scratch, "source.safetensors"), Path(scratch, "target.safetensors")
        make_source(source, parse_size(given.size))
        sequential, overlapped, runs = [], [], []
        for number in range(given.rounds):
            sequential.append(raw(source, target, overlapped=False))
            overlapped.append(raw(source, target, overlapped=True))
            runs.append(converted(source, target))
            print(
                f"round {number + 1}: raw {sequential[-1]:.3f} s one after the other, {overlapped[-1]:.3f} s "
                f"overlapped, convert {runs[-1]['seconds']:.3f} s, peak {runs[-1]['peak'] / 1e6:.0f} MB",
                flush=True,
            )

    def ratio(raws: list[float]) -> float:
        """Return the median of the ratios within rounds, as the machine's speed may change between them."""
        return statistics.median(one / run["seconds"] for one, run in zip(raws, runs, strict=True))

    record.figures.update(
        source_bytes=parse_size(given.size),
        raw_sequential_seconds=sequential,
        raw_overlapped_seconds=overlapped,
        convert=runs,
    )
    record.bar("peak RSS of the process, MB", max(run["peak"] for run in runs) / 1e6, at_most=300)
    record.bar("  of it after `import torch`, MB", statistics.median(run["torch"] for run in runs) / 1e6)
    record.bar("speed / raw, read then write", ratio(sequential), at_least=0.7)
    record.bar("speed / raw, overlapped", ratio(overlapped), at_least=0.7)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
