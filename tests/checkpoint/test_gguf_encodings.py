"""GGUF's blocks are decoded to the same values as by the `gguf` package, to the bit."""

from __future__ import annotations

from itertools import accumulate

import gguf
import numpy as np
import pytest
import torch
from sample_gguf import random_blocks, reference
from torch.profiler import ProfilerActivity, profile

from dynswap_ext.checkpoint.gguf_tensors.encodings import ENCODINGS, decode
from dynswap_ext.errors import ConfigError
from dynswap_ext.testing import assert_bit_equal

encodings = pytest.mark.parametrize("encoding", ENCODINGS)


@encodings
def test_the_layout_is_ggmls(encoding: str) -> None:
    layout = ENCODINGS[encoding]
    assert (layout.values, layout.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[encoding]]


@encodings
@pytest.mark.parametrize("shape", [(1, 256), (7, 1280), (2, 3, 512), (256,)])
def test_values_are_the_references(encoding: str, shape: tuple[int, ...]) -> None:
    blocks = random_blocks(encoding, *shape)
    assert_bit_equal(decode(blocks, encoding), reference(blocks, encoding).reshape(shape))


@encodings
def test_no_rows(encoding: str) -> None:
    assert decode(random_blocks(encoding, 0, 512), encoding).shape == (0, 512)


@encodings
def test_any_bytes(encoding: str) -> None:
    """Any bytes decode to the same values, also if scales are infinite, subnormal or NaN.

    The bits of a NaN are not compared, as they depend on the processor.
    """
    layout = ENCODINGS[encoding]
    raw = np.random.default_rng(1).integers(0, 256, (2000, layout.nbytes), dtype=np.uint8)
    blocks = torch.from_numpy(raw)
    values, expected = decode(blocks, encoding), reference(blocks, encoding)
    nan = expected.isnan()
    assert torch.equal(values.isnan(), nan)
    assert_bit_equal(values[~nan], expected[~nan])


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantised_weight_comes_back(encoding: str) -> None:
    weight = torch.randn(64, 256)
    raw = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[encoding])
    error = (decode(torch.from_numpy(raw), encoding) - weight).abs().max()
    assert error < {"4": 0.5, "5": 0.25, "8": 0.03}[encoding[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_cast_from_float32(dtype: torch.dtype) -> None:
    blocks = random_blocks("Q5_K", 5, 512)
    assert_bit_equal(decode(blocks, "Q5_K", dtype), decode(blocks, "Q5_K").to(dtype))


@encodings
def test_pieces_make_no_difference(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(encoding, 10, 512)
    whole = decode(blocks, encoding)
    monkeypatch.setattr("dynswap_ext.checkpoint.gguf_tensors.encodings._AT_ONCE_CPU", 1024)
    assert_bit_equal(decode(blocks, encoding), whole)


@encodings
def test_torchs_defaults_make_no_difference(encoding: str) -> None:
    blocks = random_blocks(encoding, 3, 256)
    expected = decode(blocks, encoding)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert_bit_equal(decode(blocks, encoding), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@encodings
def test_a_block_that_begins_anywhere(encoding: str) -> None:
    blocks = random_blocks(encoding, 1, 256)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), blocks[0]])[1:].unsqueeze(0)
    assert_bit_equal(decode(shifted, encoding), decode(blocks, encoding))


def test_rows_that_are_not_next_to_each_other() -> None:
    blocks = random_blocks("Q4_K", 8, 512)
    assert_bit_equal(decode(blocks[::3], "Q4_K"), decode(blocks, "Q4_K")[::3])


@encodings
def test_memory_beside_the_values_is_bounded(encoding: str) -> None:
    blocks = random_blocks(encoding, 64, 1 << 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        values = decode(blocks, encoding)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
    assert values.nbytes <= max(held) <= 2 * values.nbytes


def test_another_encoding_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Q8_K are not decoded here, only Q4_0.*safetensors"):
        decode(torch.zeros(1, 292, dtype=torch.uint8), "Q8_K")
