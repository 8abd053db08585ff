"""An installed model computes what the moved model computes, to the bit, in eval and in train mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from coded_masters import stored_bytes
from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp

Inputs = Callable[[Provider, torch.dtype], torch.Tensor]

CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "mlp": (mlp, lambda p, d: p.randn(4, 16, dtype=d)),
    "convnet": (ConvNet, lambda p, d: p.randn(4, 3, 8, 8, dtype=d)),
    "transformer": (TinyTransformer, lambda p, d: torch.arange(12).reshape(2, 6).to(p.device)),
    "recurrent": (Recurrent, lambda p, d: p.randn(3, 5, 6, dtype=d)),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_the_moved_model(
    provider: Provider, case: str, dtype: torch.dtype, training: bool
) -> None:
    make, inputs = CASES[case]
    model = make().train(training)
    moved, handle = provider.pair(model, dtype)
    x = inputs(provider, dtype)
    with torch.set_grad_enabled(training):
        for step in range(3):
            testing.assert_bit_equal(model(x), moved(x), f"output of pass {step}")
    stats = handle.stats()
    assert stats.copies > 0
    assert stats.bytes_moved >= sum(stored_bytes(p) for p in model.parameters())


def test_submodules_in_any_order_and_alone(provider: Provider) -> None:
    model = mlp(layers=5).eval()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    with torch.no_grad():
        for order in ([0, 2, 4, 6, 8], [8, 0, 4], [6], [2, 2, 0], [0, 2, 4, 6, 8]):
            for index in order:
                testing.assert_bit_equal(model[index](x), moved[index](x), f"layer {index}")
