"""The lossless code in torch's operations decodes what it coded, and the extension makes the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dynswap_ext.errors import SourceError
from dynswap_ext.lossless import code

#: The integer dtype that has the bits of each dtype that is coded.
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
SIZES = (1, 255, 256, 257, 4095, 4096, 4097, 100_003)
native = code.extension()

dtypes = pytest.mark.parametrize("dtype", code.CODABLE, ids=str)


@pytest.fixture(autouse=True)
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "extension", lambda: None)


def samples(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield weights of all kinds: of a model, constant, special, few in a block of escapes, and noise."""
    bits, limit = BITS[dtype], 1 << (8 * dtype.itemsize - 1)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 6e-8, 3e38, 1 / 3])
    for size in SIZES:
        yield (torch.randn(size) * 0.02).to(dtype)
        yield torch.full((size,), 3.0, dtype=dtype)
        yield special.to(dtype).repeat(size // 9 + 1)[:size]
        noise = torch.randint(-limit, limit, (size,)).to(bits).view(dtype)
        yield noise  # has NaNs of every payload
        yield torch.where(torch.rand(size) < 0.01, noise, torch.ones(size, dtype=dtype))
        mixed = torch.randn(size).to(dtype)
        mixed[: size // 3] = noise[: size // 3]  # some blocks stay raw
        yield mixed


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(BITS[left.dtype]), right.view(BITS[left.dtype])
    )


@dtypes
def test_what_is_decoded_is_what_was_coded(dtype: torch.dtype) -> None:
    coded_samples = 0
    for weights in samples(dtype):
        coded = code.encode(weights)
        if coded is None:
            continue
        coded_samples += 1
        count = len(weights)
        assert coded.dtype == torch.uint8 and coded.numel() <= 0.95 * weights.nbytes
        assert code.fits(coded.numel(), dtype, count)
        assert equal_bits(code.decode(coded, dtype, count), weights)
        for first, length in ((0, 1), (count // 3, count // 2), (count - 1, 1), (count // 2, 0)):
            part = code.decode(coded, dtype, count, first, length)
            assert equal_bits(part, weights[first : first + length]), (count, first, length)
    assert coded_samples > 10


@pytest.mark.skipif(not hasattr(native, "lossless_encode"), reason="the extension is not built (make build)")
@dtypes
def test_the_extension_makes_the_same_bytes(dtype: torch.dtype) -> None:
    for weights in samples(dtype):
        coded, other = code.encode(weights), native.lossless_encode(weights)
        assert (coded is None) == (other is None)
        if coded is not None:
            assert torch.equal(coded, other)
            assert equal_bits(code.decode(other, dtype, len(weights)), weights)
            assert equal_bits(native.lossless_decode(coded, dtype, len(weights)), weights)


@dtypes
def test_a_model_with_outliers_is_smaller(dtype: torch.dtype) -> None:
    weights = (torch.randn(1 << 16) * torch.rand(1 << 16).exp()).to(dtype)
    coded = code.encode(weights)
    smallest = {torch.bfloat16: 1.35, torch.float16: 1.1, torch.float32: 1.15}[dtype]
    assert coded is not None and weights.nbytes / coded.numel() > smallest


def test_what_is_not_coded() -> None:
    for tensor in (
        torch.ones(0),
        torch.ones(9999).double(),
        torch.ones(9999, dtype=torch.int32),
        torch.ones(9),
    ):
        assert code.encode(tensor) is None


def test_any_strides() -> None:
    weights = torch.randn(300, 200)[::2].t()
    coded = code.encode(weights)
    assert coded is not None
    assert torch.equal(code.decode(coded, weights.dtype, weights.numel()).view(weights.shape), weights)


@pytest.mark.parametrize("of", ["torch", "extension"])
@dtypes
def test_damaged_bytes_are_an_error_or_other_weights(
    of: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of == "extension":
        if not hasattr(native, "lossless_decode"):
            pytest.skip("the extension is not built (make build)")
        monkeypatch.setattr(code, "extension", lambda: native)
    weights = torch.randn(9000).to(dtype)
    coded = code.encode(weights)
    assert coded is not None
    refused = 0
    for at in [*range(100), *torch.randint(100, coded.numel(), (200,)).tolist()]:
        for value in (0, 1, 7, 128, 255):
            damaged = coded.clone()
            damaged[at] = value
            try:
                assert code.decode(damaged, dtype, 9000).shape == (9000,)
            except SourceError:
                refused += 1
    assert refused > 100
    longer = (
        [torch.cat([coded, coded[:16]])] if of == "torch" else []
    )  # else what is not used is not looked at
    for wrong in (coded[:-16], coded[:100], coded[:0], *longer):
        with pytest.raises(SourceError, match="damaged"):
            code.decode(wrong, dtype, 9000)
