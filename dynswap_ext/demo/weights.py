"""Writes random weights as one safetensors file, a tensor at a time, so that none but one is in memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from dynswap_ext.checkpoint.writing.layout import TAGS, header_of


def write_random(
    path: Path,
    skeleton: nn.Module,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    progress: Callable[[int], None] = lambda written: None,
) -> int:
    """Write weights for a model on the meta device; return the bytes of tensor data.

    Matrices are normal with variance 1/columns, so that activations keep their size; vectors are ones.

    Parameters
    ----------
    path
        Where to. It appears only when it is complete, and is then on the disk, not just in its cache.
    skeleton
        Names and shapes. A weight that is shared is written once, under its first name.
    dtype
        What the weights are stored as.
    seed
        Of the weights.
    progress
        Called with the number of bytes after each tensor.
    """
    shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    partial = path.with_name(path.name + ".partial")
    generator = torch.Generator().manual_seed(seed)
    total = 0
    try:
        with partial.open("wb") as file:
            file.write(_header(shapes, dtype))
            for tensor in _random(shapes.values(), dtype, generator):
                file.write(_bytes(tensor))
                total += tensor.nbytes
                progress(tensor.nbytes)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return total


def _header(shapes: dict[str, torch.Size], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": TAGS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header_of(entries)


def _random(
    shapes: Iterable[torch.Size], dtype: torch.dtype, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    for shape in shapes:
        if len(shape) == 1:
            yield torch.ones(shape, dtype=dtype)
        else:
            yield torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype).reshape(-1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory; numpy, which may not be installed, would know bfloat16 no better."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
