"""Masters that nn.Module's own methods move, cast or replace during an install."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_same_training_step, master_bytes, state_copy, total
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, Recurrent, TinyTransformer, mlp

Cast = Callable[[nn.Module], nn.Module]

CASTS: dict[str, tuple[Cast, torch.dtype]] = {
    "half": (lambda m: m.half(), torch.float16),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16),
    "to dtype": (lambda m: m.to(torch.float16), torch.float16),
    "to device and dtype": (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
    "to tensor": (lambda m: m.to(torch.empty(0, dtype=torch.float16)), torch.float16),
    "type": (lambda m: m.type(torch.float16), torch.float16),
    "float": (lambda m: m.half().float(), torch.float32),
    "apply": (lambda m: m._apply(lambda t: t.half() if t.is_floating_point() else t), torch.float16),
}


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("cast", CASTS)
def test_masters_cast_whole(provider: Provider, cast: str, budget: str | None) -> None:
    model = mlp()
    _, handle = provider.pair(model, budget=budget)
    masters = [id(p) for p in model.parameters()]
    x = provider.randn(3, 16)
    model(x)
    change, dtype = CASTS[cast]
    assert change(model) is model
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert [id(p) for p in model.parameters()] == masters
    moved = testing.moved(model, provider.device, torch.float64)
    handle.reset_stats()
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model)
    assert model[0].weight.dtype == torch.float64


@pytest.mark.parametrize("cast", CASTS)
def test_a_leaf_cast_alone(provider: Provider, cast: str) -> None:
    model = mlp()
    _, handle = provider.pair(model)
    x = provider.randn(3, 16)
    model(x)
    change, dtype = CASTS[cast]
    change(model[2])
    assert [m._parameters["weight"].dtype for m in model[::2]] == [torch.float32, dtype, torch.float32]
    moved = testing.moved(model, provider.device, torch.float64)
    handle.reset_stats()
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model[2])


@pytest.mark.parametrize("make", [ConvNet, Recurrent, TinyTransformer], ids=lambda c: c.__name__)
def test_models_with_buffers_ties_and_lists(provider: Provider, make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    inputs = {
        ConvNet: provider.randn(2, 3, 8, 8),
        Recurrent: provider.randn(3, 5, 6),
        TinyTransformer: torch.arange(12).reshape(2, 6).to(provider.device),
    }
    x = inputs[make]
    _, handle = provider.pair(model)
    with torch.no_grad():
        model(x)
        model.half()
        moved = testing.moved(model, provider.device, torch.float64)
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert handle.stats().bytes_moved >= master_bytes(model)


def test_masters_cast_to_what_is_wanted_and_back(provider: Provider) -> None:
    model = mlp()
    _, handle = provider.pair(model)
    x = provider.randn(3, 16)
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float16):
        model.to(dtype)
        moved = testing.moved(model, provider.device, torch.float64)
        handle.reset_stats()
        assert_same_training_step(model, moved, lambda m: m(x))
        if dtype != torch.float64:
            assert handle.stats().bytes_moved >= master_bytes(model)


def test_gradients_move_with_their_masters(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    for m in (model, moved):
        total(m(x)).backward()
    assert_gradients_as_moved(model, moved)
    model.double()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}


def test_written_tensors_reach_the_masters_before_they_move(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    weight = model[0].weight
    with torch.no_grad():
        weight.fill_(2)
    model.half()
    assert model.state_dict()["0.weight"].unique().tolist() == [2]
    assert model[0].weight.unique().tolist() == [2]
    del weight


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "leaf"])
def test_channels_last(provider: Provider, whole: bool) -> None:
    model = ConvNet().eval()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 3, 8, 8)
    with torch.no_grad():
        model(x)
        for m in (model, moved):
            (m if whole else m.conv).to(memory_format=torch.channels_last)
        assert model.conv._parameters["weight"].is_contiguous(memory_format=torch.channels_last)
        handle.reset_stats()
        assert model.conv.weight.stride() == moved.conv.weight.stride()
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert handle.stats().bytes_moved >= master_bytes(model.conv)


@pytest.mark.parametrize("meta", [False, True], ids=["emptied", "refused on the meta device"])
def test_masters_come_back_by_to_empty_and_a_load(provider: Provider, meta: bool) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    state = state_copy(model)
    x = provider.randn(3, 16)
    model(x)
    if meta:
        model.to("meta")
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            model(x)
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    handle.reset_stats()
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model)


def test_shared_memory(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    model(x)
    assert model.share_memory() is model
    assert all(p.is_shared() for p in model.parameters())
    assert_same_training_step(model, moved, lambda m: m(x))
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(3)
        moved[0].bias.fill_(3)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "leaf"])
def test_requires_grad(provider: Provider, whole: bool, budget: str | None) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(3, 16).requires_grad_()
    for wanted in (False, True):
        for m in (model, moved):
            (m if whole else m[0]).requires_grad_(wanted)
        assert model[0].weight.requires_grad is wanted
        assert model[2].weight.requires_grad is (wanted or not whole)
        assert_same_training_step(model, moved, lambda m: m(x))


def test_apply_reaches_installed_modules(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    visited: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        visited.append(module)
        if isinstance(module, nn.Linear):
            nn.init.eye_(module.weight)
            nn.init.zeros_(module.bias)

    assert model.apply(initialise) is model
    assert [m is n for m, n in zip(visited, [*model, model], strict=True)] == [True] * 7
    moved.apply(initialise)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    testing.assert_bit_equal(model.state_dict()["0.weight"], torch.eye(16))
    assert handle.stats().bytes_moved >= master_bytes(model)


@pytest.fixture(params=["overwrite", "swap"])
def conversion(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set each of torch's two other ways to convert a parameter."""
    future = torch.__future__
    setters = {
        "overwrite": future.set_overwrite_module_params_on_conversion,
        "swap": future.set_swap_module_params_on_conversion,
    }
    setters[request.param](True)
    yield request.param
    setters[request.param](False)


def test_conversion_by_other_means(provider: Provider, conversion: str) -> None:
    model = mlp()
    _, handle = provider.pair(model)
    x = provider.randn(3, 16)
    with torch.no_grad():
        model(x)
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    moved = testing.moved(model, provider.device, torch.float64)
    handle.reset_stats()
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model)
