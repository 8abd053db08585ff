"""From checkpoint files to a GPU: streamed through pinned buffers, loaded onto it, decoded on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pretend_cuda
from dynswap_ext import checkpoint, testing
from dynswap_ext.checkpoint.gguf import GGUFTensor
from dynswap_ext.checkpoint.gguf_tensors.encodings import ENCODINGS
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_mapped_masters_stream_from_the_file(gpu: Gpu, dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    source = Exact().eval()
    checkpoint.save(source, path)
    model = checkpoint.load(Exact, path).eval()
    budget = 3 * LAYER_BYTES * dtype.itemsize // 4
    moved, handle = gpu.pair(model, dtype, budget=budget)
    inputs = [gpu.whole_numbers(seed=seed, dtype=dtype) for seed in range(3)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        outputs = []
        for x in inputs:
            gpu.delay(10)
            outputs.append(model(x))
    gpu.synchronise()
    testing.assert_bit_equal(outputs, expected)
    stats = handle.stats()
    assert stats.bytes_moved >= LAYERS * LAYER_BYTES
    assert stats.overflow_bytes == 0 and stats.peak_bytes <= budget


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
def test_loading_onto_the_device(gpu: Gpu, name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    source = Exact(layers=3)
    path = tmp_path / name
    if name.endswith(".pt"):
        torch.save(source.state_dict(), path)
    else:
        checkpoint.save(source, path)
    before = gpu.allocated()
    device = str(gpu.device)
    model = checkpoint.load(Exact(layers=3), path, device=device, dtype=dtype)
    gpu.synchronise()
    for (key, value), wanted in zip(model.state_dict().items(), source.parameters(), strict=True):
        testing.assert_bit_equal(value, wanted.detach().to(gpu.device, dtype), key)
    weights = 3 * LAYER_BYTES * (dtype.itemsize if dtype else 4) // 4
    left = gpu.allocated() - before - weights
    # A card's allocator rounds large blocks to 2 MiB; the pretend one does not.
    most = 0 if pretend_cuda.active() else 2 << 20
    assert 0 <= left <= most, "more than the weights is left on the device"
    handle = gpu.install(model)
    x = gpu.whole_numbers(dtype=dtype or torch.float32)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), source.to(gpu.device, dtype)(x))
    # Masters that are on the device already are handed out as they are.
    assert handle.stats().bytes_moved == 0


def blocks_of(encoding: str, rows: int = 8, columns: int = 1024) -> torch.Tensor:
    """Return blocks of any bytes whose scales are neither infinite nor NaN: no byte has all bits set."""
    layout = ENCODINGS[encoding]
    generator = torch.Generator().manual_seed(1)
    nbytes = columns // layout.values * layout.nbytes
    return torch.randint(0, 60, (rows, nbytes), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_blocks_are_decoded_on_the_device(gpu: Gpu, encoding: str) -> None:
    """Blocks decode to the same values as on the CPU, up to the order of two float32 operations."""
    if encoding.startswith(("IQ1", "IQ2", "IQ3")):
        pytest.importorskip("gguf", reason="the tables of these encodings come with the package gguf")
    weight = GGUFTensor(blocks_of(encoding), encoding, torch.float32)
    there = weight.to(gpu.device)
    assert there.device == gpu.device and there.blocks.device == gpu.device
    expected, found = weight.dequantize(), there.dequantize()
    assert found.device == gpu.device and expected.isfinite().all()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)
