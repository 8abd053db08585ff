"""Elements count as changed if their bits differ."""

from __future__ import annotations

import pytest
import torch

from dynswap_ext import testing
from dynswap_ext._swap.changed_elements import changed_elements, with_changes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_the_sign_of_zero_and_nan(dtype: torch.dtype) -> None:
    original = torch.tensor([0.0, float("nan"), 1.0, 1.0]).to(dtype)
    tensor = torch.tensor([-0.0, float("nan"), 1.0, 2.0]).to(dtype)
    assert changed_elements(tensor, original).tolist() == [True, False, False, True]


def test_an_element_of_which_one_part_has_changed_is_one_element() -> None:
    original = torch.tensor([1 + 1j, 2 + 2j, 3 + 3j])
    tensor = torch.tensor([1 + 1j, 2 - 2j, 4 + 3j])
    changed = changed_elements(tensor.conj(), original.conj())
    assert changed.tolist() == [False, True, True]
    testing.assert_bit_equal(with_changes(original, tensor, changed), tensor)


def test_elements_that_have_not_changed_keep_the_masters_precision() -> None:
    master = torch.tensor([1 + 1e-6, 1 + 1e-6])
    tensor = master.bfloat16()
    tensor[1] = 3
    changed = changed_elements(tensor, master.bfloat16())
    testing.assert_bit_equal(with_changes(master, tensor, changed), torch.tensor([1 + 1e-6, 3]))
