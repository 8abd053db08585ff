"""What the layouts of GGUF's blocks are made of. All of it runs on the device of the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Encoding", "copied", "fields", "halves", "looked_up", "scaled", "signed"]


@dataclass(frozen=True)
class Encoding:
    """One quantised type: `values` values of a row in `nbytes` bytes."""

    values: int
    nbytes: int
    #: From uint8 (n, nbytes) to float32 (n, values).
    decode: Callable[[torch.Tensor], torch.Tensor]


def copied(part: torch.Tensor) -> torch.Tensor:
    """The part by itself: a single row is contiguous where it is, and may begin at any byte."""
    return part.clone(memory_format=torch.contiguous_format)


def halves(part: torch.Tensor) -> torch.Tensor:
    """Pairs of bytes as float16, in float32."""
    return copied(part).view(torch.float16).float()


def fields(part: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The bit fields of bytes, uint8 (n, values).

    Of each `width` bytes first the lowest fields, then the next.
    """
    # Made on the device: a list would be copied there, and waited for.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=part.device).reshape(1, 1, -1, 1)
    fields = part.reshape(part.shape[0], -1, 1, width) >> shifts
    return fields.bitwise_and_((1 << bits) - 1).reshape(part.shape[0], -1)


def signed(fields: torch.Tensor, middle: int) -> torch.Tensor:
    """Fields of less than 8 bits, less `middle`."""
    return fields.view(torch.int8) - middle


def looked_up(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of a small table on the CPU, (n, values)."""
    # From pageable memory a copy this small does not wait for the device, if it is told so.
    there = table.to(index.device, non_blocking=True)
    return there.index_select(0, index.reshape(-1).int()).reshape(index.shape[0], -1)


def scaled(scales: torch.Tensor, fields: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
    """`scales` (n, groups) times the values of each group, less `minima`."""
    count, groups = scales.shape
    values = scales.unsqueeze(-1) * fields.reshape(count, groups, -1)
    if minima is not None:
        values -= minima.unsqueeze(-1)
    return values.reshape(count, -1)
