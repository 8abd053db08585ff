"""On a GPU an installed model computes what the moved one does, to the bit, and its weights do move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu
from sample_models import ConvNet, Recurrent, TinyTransformer

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
    # No budget, no residents: the ring alone may save what is still in it when the next pass begins.
    ring = stats.depth + 2 if gpu.native else 0
    least = PASSES * LAYERS - (PASSES - 1) * ring
    assert max(LAYERS, least) * LAYER_BYTES <= stats.bytes_moved <= (PASSES * LAYERS + ring) * LAYER_BYTES
    assert stats.overflow_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resident(gpu: Gpu, dtype: torch.dtype | None) -> None:
    model = Exact(layers=2).eval()
    moved, handle = gpu.pair(model, dtype, budget="1GiB")
    x = gpu.whole_numbers(dtype=dtype or torch.float32)
    with torch.no_grad():
        for _ in range(PASSES):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved == 2 * LAYER_BYTES  # each weight once


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (ConvNet, (2, 3, 9, 9)),
        (Recurrent, (2, 5, 6)),
        (TinyTransformer, None),
    ],
    ids=["convolutions and buffers", "recurrent", "transformer"],
)
def test_kinds_of_weights(gpu: Gpu, make: Callable[[], nn.Module], shape: tuple[int, ...] | None) -> None:
    model = make().eval()
    moved, handle = gpu.pair(model)
    x: Tensor = torch.arange(6, device=gpu.device)[None] if shape is None else gpu.provider.randn(*shape)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_cast_of_awkward_values(gpu: Gpu, dtype: torch.dtype | None) -> None:
    """Rounding, infinities, denormals and the odd sizes at the end of a kernel's blocks."""
    values = torch.tensor([0.0, -0.0, 1e-40, 6e-8, 65519.0, 65520.0, 3.4e38, float("inf"), -1 / 3])
    model = nn.Module()
    for size in (1, 7, 255, 4099):
        model.register_parameter(f"w{size}", nn.Parameter(values.repeat(size)[: 3 * size + 1].clone()))
    moved, _ = gpu.pair(model, dtype)
    for name, expected in moved.named_parameters():
        testing.assert_bit_equal(getattr(model, name).detach().clone(), expected.detach(), name)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_masters_of_other_dtypes(gpu: Gpu, stored: torch.dtype) -> None:
    model = Exact(layers=3).to(stored).eval()
    moved, handle = gpu.pair(model, torch.float32)
    x = gpu.whole_numbers(dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().bytes_moved > 0


def test_a_master_written_between_passes(gpu: Gpu) -> None:
    model = Exact().eval()
    _, handle = gpu.pair(model, budget=5 * 2 * LAYER_BYTES)  # some resident, some streamed
    x = gpu.whole_numbers()
    with torch.no_grad():
        for number in range(LAYERS):
            gpu.delay(5)
            model(x)
            list(model.parameters())[number].neg_()
            moved = testing.moved(model, gpu.device, torch.float64)
            testing.assert_bit_equal(model(x), moved(x), f"after layer {number} was written")
    assert handle.stats().bytes_moved > LAYERS * LAYER_BYTES
