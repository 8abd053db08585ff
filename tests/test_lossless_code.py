"""The lossless code of tensors: what `_C` decodes is what it coded, to the bit."""

from __future__ import annotations

import pytest
import torch

from dynswap_ext.errors import DynswapError

_C = pytest.importorskip("dynswap_ext._C", reason="the extension is not built (make build)")

CODED = [torch.bfloat16, torch.float16, torch.float32]


def weights(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 0.02).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_a_tensor_is_decoded_to_the_bit(dtype: torch.dtype) -> None:
    tensor = weights(dtype, 123, 457)
    coded = _C.lossless_encode(tensor)
    assert coded is not None and coded.dtype == torch.uint8 and coded.ndim == 1
    assert coded.numel() <= 0.95 * tensor.nbytes
    assert _C.lossless_check(coded, dtype, tensor.numel()) == ""
    assert same(_C.lossless_decode(coded, dtype, tensor.numel()), tensor)


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_a_part_of_a_tensor_is_decoded_alone(dtype: torch.dtype) -> None:
    tensor = weights(dtype, 20000)
    coded = _C.lossless_encode(tensor)
    assert coded is not None
    assert same(_C.lossless_decode(coded, dtype, 20000, 4097), tensor[4097:])
    out = torch.empty(3, 1500, dtype=dtype)
    result = _C.lossless_decode(coded, dtype, 20000, first=4000, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert same(out.reshape(-1), tensor[4000:8500])


def test_what_saves_less_than_a_twentieth_is_not_coded() -> None:
    noise = torch.randint(-(2**15), 2**15, (20000,), generator=torch.Generator().manual_seed(1))
    assert _C.lossless_encode(noise.to(torch.int16).view(torch.bfloat16)) is None
    assert _C.lossless_encode(weights(torch.bfloat16, 10)) is None
    assert _C.lossless_encode(torch.empty(0)) is None


def test_damage_is_an_error() -> None:
    coded = _C.lossless_encode(weights(torch.bfloat16, 20000))
    assert coded is not None
    wrong = f"its {coded.numel()} bytes are not those that its index has for 30000 weights"
    assert _C.lossless_check(coded, torch.bfloat16, 30000) == wrong
    coded[48] = 9  # the kind of the first block
    assert _C.lossless_check(coded, torch.bfloat16, 20000) == "its kind is not known at block 0 of 5"
    with pytest.raises(DynswapError, match="its kind is not known at block 0 of 5"):
        _C.lossless_decode(coded, torch.bfloat16, 20000)
    assert _C.lossless_decode(coded, torch.bfloat16, 20000, first=4096).numel() == 20000 - 4096


def test_arguments_that_cannot_be_are_refused() -> None:
    tensor = weights(torch.bfloat16, 100, 200)
    coded = _C.lossless_encode(tensor)
    assert coded is not None
    with pytest.raises(ValueError, match="bfloat16, float16 and float32"):
        _C.lossless_encode(tensor.double())
    with pytest.raises(ValueError, match="contiguous"):
        _C.lossless_encode(tensor.T)
    with pytest.raises(ValueError, match="one of uint8"):
        _C.lossless_check(tensor, torch.bfloat16, 20000)
    with pytest.raises(ValueError, match="another dtype"):
        _C.lossless_decode(coded, torch.bfloat16, 20000, out=torch.empty(5))
    with pytest.raises(ValueError, match="of 20000 weights there are none from 19999 to 20001"):
        _C.lossless_decode(coded, torch.bfloat16, 20000, 19999, torch.empty(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="first is a number of weights, not -1"):
        _C.lossless_decode(coded, torch.bfloat16, 20000, first=-1)
