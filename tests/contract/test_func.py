"""torch.func and forward-mode differentiation over installed models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_moved, total
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, mlp

Tensors = dict[str, torch.Tensor]


def masters_of(model: nn.Module) -> Tensors:
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_close_tree(actual: Any, expected: Any) -> None:
    """Assert that both have the same numbers, up to the rounding to the masters' dtype."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_close_tree(actual[name], expected[name])
        return
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=1e-5, atol=1e-6)


def assert_streamed(provider: Provider, handle: dynswap_ext.Handle, model: nn.Module) -> None:
    """Assert that the native provider has streamed. Pure Python counts no bytes inside a transform."""
    if provider.native:
        assert_moved(handle, model)


def test_functional_call_with_masters_and_with_a_part(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    testing.assert_bit_equal(functional_call(model, masters_of(model), (x,)), moved(x).detach(), "all")
    part = {"0.weight": torch.randn(16, 16)}
    expected = functional_call(moved, {"0.weight": part["0.weight"].to(x)}, (x,))
    testing.assert_bit_equal(functional_call(model, part, (x,)), expected, "a part")
    testing.assert_bit_equal(model(x), moved(x), "output after")
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_functional_call_gives_gradients_to_what_it_was_given(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    given = {name: p.clone().requires_grad_() for name, p in masters_of(model).items()}
    functional_call(model, given, (x,)).square().sum().backward()
    moved(x).square().sum().backward()
    for name, p in moved.named_parameters():
        testing.assert_bit_equal(given[name].grad, p.grad.float().cpu(), name)
    assert all(p.grad is None for p in model.parameters())
    testing.assert_nothing_held(handle)


def test_functional_call_with_buffers(provider: Provider) -> None:
    model = ConvNet().train()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 3, 5, 5)
    before = {name: b.clone() for name, b in model.named_buffers()}
    given = {name: b.clone() for name, b in before.items()}
    wanted = {name: b.to(moved.get_buffer(name), copy=True) for name, b in before.items()}
    with torch.no_grad():
        y, expected = functional_call(model, given, (x,)), functional_call(moved, wanted, (x,))
    testing.assert_bit_equal(y, expected, "output")
    testing.assert_bit_equal(dict(model.named_buffers()), before, "the model's own buffers")
    # As with a plain model, the statistics are written on the tensors that were given.
    for name, b in wanted.items():
        torch.testing.assert_close(given[name].double(), b.double().cpu(), rtol=1e-6, atol=1e-6, msg=name)


def test_grad_over_masters(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)

    def loss(m: nn.Module, p: Tensors) -> torch.Tensor:
        return functional_call(m, p, (x,)).square().sum()

    found = grad(lambda p: loss(model, p))(masters_of(model))
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert_close_tree(found, grad(lambda p: loss(moved, p))(masters_of(moved)))


@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=["jacrev", "jacfwd", "hessian"])
def test_transforms_over_the_input(provider: Provider, transform: Any) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x = provider.randn(16)
    found, expected = (transform(lambda v, m=m: m(v).square().sum())(x) for m in (model, moved))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    testing.assert_bit_equal(model(x), moved(x), "output after")
    assert_streamed(provider, handle, model)


def test_grad_over_the_input(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    found, expected = (grad(lambda v, m=m: m(v).square().sum())(x) for m in (model, moved))
    testing.assert_bit_equal(found, expected, "gradient of the input")
    assert_streamed(provider, handle, model)
    # A pass inside a transform leaves nothing of the transform on the weights.
    losses = [total(m(x)) for m in (model, moved)]
    for loss in losses:
        loss.backward()
    assert_gradients_as_moved(model, moved)


def test_jvp_and_vjp_over_the_input(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x, tangent = provider.randn(3, 16), provider.randn(3, 16, seed=1)
    found, expected = (jvp(m, (x,), (tangent,)) for m in (model, moved))
    testing.assert_bit_equal([t.detach() for t in found], [t.detach() for t in expected], "jvp")
    pulled = []
    for m in (model, moved):
        y, pull = vjp(m, x)
        pulled.append((y.detach(), pull(tangent)[0].detach()))
    testing.assert_bit_equal(pulled[0], pulled[1], "vjp")
    assert_streamed(provider, handle, model)


def test_jvp_and_vjp_over_masters(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    found = []
    for m in (model, moved):
        masters = masters_of(m)
        tangents = {name: torch.ones_like(p) for name, p in masters.items()}
        y, pushed = jvp(lambda p, m=m: functional_call(m, p, (x,)), (masters,), (tangents,))
        _, pull = vjp(lambda p, m=m: functional_call(m, p, (x,)), masters)
        found.append((y, pushed, pull(torch.ones_like(y))[0]))
    testing.assert_bit_equal(found[0][:2], found[1][:2], "jvp")
    assert_close_tree(found[0][2], found[1][2])


def test_vmap_over_inputs(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x = provider.randn(4, 3, 16)
    testing.assert_bit_equal(vmap(model)(x).detach(), vmap(moved)(x).detach(), "output")
    assert_streamed(provider, handle, model)


def test_gradients_by_sample(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(4, 16)

    def loss(m: nn.Module, p: Tensors, sample: torch.Tensor) -> torch.Tensor:
        return functional_call(m, p, (sample.unsqueeze(0),)).square().sum()

    found, expected = (
        vmap(grad(lambda p, v, m=m: loss(m, p, v)), in_dims=(None, 0))(masters_of(m), x)
        for m in (model, moved)
    )
    assert_close_tree(found, expected)


@pytest.mark.parametrize("base", ["a plain skeleton", "an installed model"])
def test_an_ensemble(provider: Provider, base: str) -> None:
    models = [mlp(layers=2) for _ in range(3)]
    moved = [provider.pair(model)[0] for model in models]
    x = provider.randn(3, 16)
    parameters, buffers = stack_module_state(models)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    expected_parameters, _ = stack_module_state(moved)
    assert_close_tree(dict(parameters), dict(expected_parameters))
    expected = torch.stack([m(x) for m in moved])
    if base == "a plain skeleton":
        skeleton = copy.deepcopy(models[0]).to("meta")
        parameters = {name: p.to(x) for name, p in parameters.items()}
    else:
        skeleton = models[0]
    found = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_forward_mode_over_the_input(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x, tangent = provider.randn(3, 16), provider.randn(3, 16, seed=1)
    found = []
    for m in (model, moved):
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(m(forward_ad.make_dual(x, tangent)))
            found.append((out.primal.detach(), out.tangent.detach()))
    testing.assert_bit_equal(found[0], found[1], "dual output")
    assert_moved(handle, model)


def test_forward_mode_over_masters(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    found = []
    for m in (model, moved):
        with forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in masters_of(m).items()}
            out = forward_ad.unpack_dual(functional_call(m, duals, (x,)))
            found.append((out.primal, out.tangent))
    testing.assert_bit_equal(found[0], found[1], "dual output")


def test_forward_mode_over_a_handed_out_weight(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    x = provider.randn(3, 16)
    with forward_ad.dual_level():
        tangent = torch.ones(16, 16, dtype=torch.float64, device=provider.device)
        weight = forward_ad.make_dual(model[0].weight, tangent)
        out = forward_ad.unpack_dual(x @ weight.t())
        torch.testing.assert_close(out.tangent.detach(), x @ tangent.t())
    assert forward_ad.unpack_dual(model[0].weight.detach()).tangent is None


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_tracing_through_functionalize(provider: Provider, mode: str) -> None:
    """Masters that `functionalize` has wrapped, and that so have no memory of their own, can be used."""
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)

    def run(m: nn.Module, values: Tensors, x: torch.Tensor) -> torch.Tensor:
        return functional_call(m, values, (x,))

    values, there = masters_of(model), masters_of(moved)
    expected = functionalize(lambda p, x: run(moved, p, x))(there, x)
    testing.assert_bit_equal(functionalize(lambda p, x: run(model, p, x))(values, x), expected)
    graph = make_fx(functionalize(lambda p, x: run(model, p, x)), tracing_mode=mode)(values, x)
    testing.assert_bit_equal(graph(values, x), expected)


def test_batched_gradients(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    batches = torch.eye(48, dtype=torch.float64, device=provider.device).view(48, 3, 16)
    found = [
        torch.autograd.grad(m(x), [*m.parameters()], batches, is_grads_batched=True) for m in (model, moved)
    ]
    for mine, theirs in zip(*found, strict=True):
        assert mine.device.type == "cpu"
        torch.testing.assert_close(mine, theirs.float().cpu(), rtol=1e-5, atol=1e-6)
