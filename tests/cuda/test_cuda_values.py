"""On a GPU an installed model computes the same as a moved one, to the bit, and its weights are streamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu

PASSES = 4
DTYPES = (None, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streamed(gpu: Gpu, dtype: torch.dtype | None) -> None:
    model = Exact().eval()
    moved, handle = gpu.pair(model, dtype)
    x = gpu.whole_numbers(dtype=dtype or torch.float32)
    with torch.no_grad():
        for _ in range(PASSES):
            testing.assert_bit_equal(model(x), moved(x))
    gpu.synchronise()
    stats = handle.stats()
    # Without a budget there are no residents. Only weights still in the ring need no copy in the next pass.
    ring = stats.depth + 2 if gpu.native else 0
    least = PASSES * LAYERS - (PASSES - 1) * ring
    assert max(LAYERS, least) * LAYER_BYTES <= stats.bytes_moved <= (PASSES * LAYERS + ring) * LAYER_BYTES
    assert stats.overflow_bytes == 0


@pytest.mark.parametrize("stored", [torch.float32, *DTYPES[1:]], ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_every_cast_of_awkward_values(gpu: Gpu, dtype: torch.dtype | None, stored: torch.dtype) -> None:
    """Casts are right for rounding, infinities, denormals and odd sizes at the end of a kernel's blocks."""
    values = torch.tensor([0.0, -0.0, 1e-40, 6e-8, 65519.0, 65520.0, 3.4e38, float("inf"), -1 / 3])
    model = nn.Module()
    for size in (1, 7, 255, 4099):
        model.register_parameter(f"w{size}", nn.Parameter(values.repeat(size)[: 3 * size + 1].clone()))
    model.to(stored)
    moved, _ = gpu.pair(model, dtype)
    for name, expected in moved.named_parameters():
        testing.assert_bit_equal(getattr(model, name).detach().clone(), expected.detach(), name)
