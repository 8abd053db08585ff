"""A LosslessTensor in inference mode, where operations that are made of others are dispatched too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynswap_ext.testing import assert_bit_equal
from sample_lossless import make

IN_INFERENCE: dict[str, Callable[[Any], torch.Tensor]] = {
    "double": lambda t: t.double(),
    "to": lambda t: t.to(torch.bfloat16),
    "contiguous": lambda t: t.t().contiguous(),
    "reshape": lambda t: t.t().reshape(-1),
    "flatten": lambda t: t.flatten(),
    "matmul": lambda t: t @ t.t(),
    "chunk": lambda t: t.chunk(2, 1)[1],
    "type_as": lambda t: t.type_as(torch.ones(1, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", IN_INFERENCE)
@pytest.mark.parametrize("given", ["a tensor", "its data"])
def test_as_of_a_plain_tensor(name: str, given: str) -> None:
    with torch.inference_mode():
        tensor, plain = make(60, 90)
        if given == "its data":
            tensor.data = torch.randn(60, 90)
            plain = tensor.decoded()
    for inside in (True, False):
        with torch.inference_mode(inside):
            found, expected = IN_INFERENCE[name](tensor), IN_INFERENCE[name](plain)
            assert found.shape == expected.shape and found.dtype == expected.dtype
            assert_bit_equal(found + 0, expected + 0, name)
