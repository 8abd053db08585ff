"""An installed model computes what the moved model computes, to the bit, in eval and in train mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

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
    assert stats.bytes_moved >= sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_grad_modes_share_one_install(provider: Provider, mode: Callable[[], torch.no_grad]) -> None:
    model = mlp().eval()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    with mode():
        testing.assert_bit_equal(model(x), moved(x), "output without gradients")
    loss, expected = model(x).sum(), moved(x).sum()
    testing.assert_bit_equal(loss, expected, "output with gradients")
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert handle.stats().bytes_moved >= sum(p.numel() * p.element_size() for p in model.parameters())


def test_no_inference_tensor_is_kept(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model, budget="1GiB")
    with torch.inference_mode():
        model(provider.randn(2, 16))
        assert not model[0].weight.is_inference()
    assert not model[0].weight.is_inference()
    model(provider.randn(2, 16)).sum().backward()


def test_file_mapped_masters_give_the_same_outputs(
    provider: Provider, mapped: Callable[[nn.Module], nn.Module]
) -> None:
    model = mapped(mlp(features=64)).eval()
    moved = testing.moved(model, provider.device)
    handle = provider.install(model)
    x = provider.randn(4, 64, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x), "output")
    if provider.name != "python":  # pure Python hands the mapping itself out on the CPU
        assert handle.stats().bytes_moved >= sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_weight_read_outside_its_forward(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    testing.assert_bit_equal(x @ model[2].weight.t(), x @ moved[2].weight.t())
    assert handle.stats().bytes_moved > 0


def test_submodules_in_any_order_and_alone(provider: Provider) -> None:
    model = mlp(layers=5).eval()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    with torch.no_grad():
        for order in ([0, 2, 4, 6, 8], [8, 0, 4], [6], [2, 2, 0], [0, 2, 4, 6, 8]):
            for index in order:
                testing.assert_bit_equal(model[index](x), moved[index](x), f"layer {index}")


def test_two_models_with_the_same_names(provider: Provider) -> None:
    first, second = mlp(), mlp()
    moved_first, _ = provider.pair(first)
    moved_second, _ = provider.pair(second)
    x = provider.randn(2, 16)
    for _ in range(2):
        testing.assert_bit_equal(first(x), moved_first(x))
        testing.assert_bit_equal(second(x), moved_second(x))


def test_torch_compile_gives_the_same_output(provider: Provider) -> None:
    model = mlp().eval()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(compiled(x), moved(x))
    torch._dynamo.reset()


def test_functional_call_uses_the_tensors_given(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x = provider.randn(2, 16)
    expected = torch.nn.functional.gelu(x @ other["0.weight"].to(x).t() + other["0.bias"].to(x))
    torch.testing.assert_close(torch.func.functional_call(model, other, (x,)), expected)
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(other)
    assert all(g.abs().sum() > 0 and g.dtype == torch.float32 for g in gradients.values())
