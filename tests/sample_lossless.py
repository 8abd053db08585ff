"""Coded tensors for tests, and a count of what is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dynswap_ext.lossless import tensor as under_test
from dynswap_ext.lossless.tensor import LosslessTensor, encoded


def make(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[LosslessTensor, torch.Tensor]:
    """Return a coded tensor, and a plain one with the same values."""
    plain = torch.randn(shape or (70, 300)).to(dtype)
    plain.view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])
    coded = encoded(plain, "w in a file")
    assert isinstance(coded, LosslessTensor) and coded.coded is not None
    return coded, plain


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list that gets the number of weights of each decoding."""
    lengths: list[int] = []

    def decode(coded: Any, dtype: Any, count: int, first: int = 0, length: int | None = None) -> torch.Tensor:
        lengths.append(count - first if length is None else length)
        return original(coded, dtype, count, first, length)

    original = under_test.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "decode", decode)
        yield lengths
