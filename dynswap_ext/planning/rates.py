"""How fast this machine is: from masters to the device, in arithmetic, in its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext import config
from dynswap_ext._mappings import mappings
from dynswap_ext.demo.measure import disk_bandwidth, pinned_bandwidth
from dynswap_ext.planning.machine import Machine
from dynswap_ext.planning.stopwatch import clock_of
from dynswap_ext.planning.weights import own_masters

__all__ = ["files_of", "latency_of", "masters_bandwidth", "measure_machine"]

#: Threads that read files in the host backend (csrc/host/host_backend.h).
_READERS: Final = 4
#: Bytes that are read or copied to know a bandwidth.
_SAMPLE: Final = 1 << 30
#: Seconds to begin a copy: a call of the CUDA runtime, or a read of a disk.
_LATENCY: Final = {"cuda": 7e-6, "cpu": 1e-4}


def latency_of(device: torch.device) -> float:
    """Seconds to begin a copy to a device; not measured."""
    return _LATENCY.get(device.type, 7e-6)


def measure_machine(
    device: torch.device | str | int, *, dtype: torch.dtype | None = None, file: Path | None = None
) -> Machine:
    """Bandwidth, arithmetic and memory of a device, in some seconds.

    Parameters
    ----------
    device
        As for `install`.
    dtype
        Of the matrix products; default: bfloat16 on an accelerator, float32 on the CPU.
    file
        For the CPU: what masters are mapped from. Without one, the bandwidth is that of memory.

    Raises
    ------
    ConfigError
        There is no such device.
    """
    where = config.resolve(device=device).device
    accelerator = where.type != "cpu"
    kind = dtype or (torch.bfloat16 if accelerator else torch.float32)
    side = 8192 if accelerator else 1024
    left, right = (torch.randn(side, side, device=where).to(kind) for _ in range(2))
    block = torch.empty(_SAMPLE // 4, dtype=torch.uint8, device=where)
    target = torch.empty_like(block)
    product = _fastest(lambda: left @ right, where)
    copied = _fastest(lambda: target.copy_(block), where)
    bandwidth, how, _ = masters_bandwidth(where, [] if file is None else [file])
    return Machine(
        name=_name(where),
        bandwidth=bandwidth,
        arithmetic=2 * side**3 / product,
        memory=2 * block.nbytes / copied,
        latency=latency_of(where),
        bandwidth_kind=how,
    )


def masters_bandwidth(device: torch.device, files: Sequence[Path]) -> tuple[float, str, tuple[str, ...]]:
    """Bytes a second, how they were measured, and what to say of it."""
    if device.type == "cuda":
        return pinned_bandwidth(device), "copies from pinned memory", ()
    if files:
        largest = max(files, key=lambda file: file.stat().st_size)
        rate = disk_bandwidth(largest, readers=_READERS, limit=_SAMPLE)
        return rate, f"direct reads of {largest.name}, {_READERS} at a time", ()
    block = torch.empty(_SAMPLE // 4, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    seconds = _fastest(lambda: target.copy_(block), device)
    note = (
        "Masters are not mapped from a file, and the device is the CPU: copies are taken to be those of "
        "memory. A checkpoint opened with checkpoint.load streams from its disk."
    )
    return block.nbytes / seconds, "copies in memory", (note,)


def files_of(model: nn.Module) -> list[Path]:
    """Regular files that masters are mapped from."""
    addresses = sorted(
        master.data_ptr()
        for module in model.modules()
        for master, _ in own_masters(module)
        if master.device.type == "cpu"
        and master.layout is torch.strided
        and type(master).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )
    found: dict[Path, None] = {}
    position = 0
    for mapping in mappings():  # by address, as the masters are
        while position < len(addresses) and addresses[position] < mapping.begin:
            position += 1
        if position < len(addresses) and addresses[position] < mapping.end and Path(mapping.name).is_file():
            found.setdefault(Path(mapping.name))
    return list(found)


def _fastest(call: Callable[[], Any], device: torch.device, *, repeats: int = 5) -> float:
    """Seconds of the fastest of some calls."""
    clock = clock_of(device)
    call()
    best = float("inf")
    for _ in range(repeats):
        begin = clock.mark()
        call()
        end = clock.mark()
        clock.settle()
        best = min(best, clock.between(begin, end))
    return best


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"
