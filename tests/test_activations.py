"""`install(activations=)`: what autograd saves leaves the device, and backward finds it as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as recompute

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_activations import ACTIVATION, LAYERS, LIMIT, ROWS, WIDTH, Forward, Stack, pair

Offload = Callable[..., dynswap_ext.Handle]


@pytest.fixture
def offload(provider: Provider) -> Offload:
    return lambda model, activations=LIMIT, **options: provider.offload(model, activations, **options)


def test_gradients_are_equal_and_the_peak_is_bounded(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    handle = offload(model)
    for step in range(4):
        testing.assert_bit_equal(model.step(x), moved.step(x))
        stats = handle.stats()
        # All that exceeds the limit, but the input, which the caller has.
        assert stats.offloaded_bytes >= 2 * LAYERS * ACTIVATION - LIMIT - ACTIVATION, step
        assert stats.restored_bytes <= stats.offloaded_bytes
        assert stats.saved_bytes <= LIMIT + 3 * ACTIVATION, "the limit, and what one layer saves"
        if step > 1:
            assert stats.misses <= stats.hits / 20, step
        assert stats.overflow_bytes == 0
        handle.reset_stats()


@pytest.mark.parametrize("layers", [6, 12, 24])
def test_the_peak_does_not_grow_with_the_depth(provider: Provider, offload: Offload, layers: int) -> None:
    model = Stack(layers)
    handle = offload(model)
    x = torch.randn(ROWS, WIDTH, device=provider.device)
    for _ in range(2):
        model.step(x)
    assert handle.stats().saved_bytes <= LIMIT + 3 * ACTIVATION


def test_nothing_moves_if_all_of_it_fits(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    handle = offload(model, "1GiB")
    for _ in range(2):
        testing.assert_bit_equal(model.step(x), moved.step(x))
    assert handle.stats().offloaded_bytes == 0


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "resident"])
def test_beside_weights_that_are_cast(provider: Provider, offload: Offload, streamed: bool) -> None:
    model, moved, x = pair(provider)
    moved.double()
    handle = offload(model, dtype=torch.float64, budget="minimum" if streamed else "64MiB")
    for _ in range(3):
        model.zero_grad()
        moved.zero_grad()
        for each in (model, moved):
            each(x.double()).square().mean().backward()
        found, expected = model.gradients(), moved.gradients()
        testing.assert_bit_equal(found, [grad.float() for grad in expected])
    assert handle.stats().offloaded_bytes > 0


def of_views(model: Stack, x: Tensor) -> Tensor:
    """Save views of one storage: parts, transposed, expanded, of another dtype."""
    for layer in model.layers:
        y = layer(x)
        left, right = y.chunk(2, dim=1)
        z = (left.t() @ right).sigmoid() @ left.t()
        wide = y[:1].expand(ROWS, WIDTH) * y
        x = x + torch.tanh(z.t() @ torch.ones(WIDTH // 2, WIDTH, device=x.device)) + wide.sin()
    return x


def of_conjugates(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers[:4]:
        y = torch.view_as_complex(layer(x).unflatten(1, (-1, 2)).contiguous())
        x = x + torch.view_as_real(y.conj() * y.exp() * y.imag).flatten(1)
    return x


def non_reentrant(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = recompute.checkpoint(lambda x, layer=layer: x + torch.tanh(layer(x)), x, use_reentrant=False)
    return x


def reentrant(model: Stack, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    for layer in model.layers:
        x = recompute.checkpoint(lambda x, layer=layer: x + torch.tanh(layer(x)), x, use_reentrant=True)
    return x


def with_hooks_inside(model: Stack, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        hooks = torch.autograd.graph.saved_tensors_hooks(Tensor.double, Tensor.float)
        with hooks if number % 3 == 0 else nullcontext():
            x = x + torch.tanh(layer(x))
    return x


def with_dropout(model: Stack, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    for layer in model.layers:
        x = x + nn.functional.dropout(torch.tanh(layer(x)), 0.5)
    return x


def in_place(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        left, right = layer(x).mul_(2).unsafe_chunk(2, dim=1)
        x = x + torch.cat((left.sigmoid_(), right.tanh_()), 1)
    return x


FORWARDS = [of_views, of_conjugates, non_reentrant, reentrant, with_hooks_inside, with_dropout, in_place]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_other_forwards(provider: Provider, offload: Offload, forward: Forward) -> None:
    model, moved, x = pair(provider, forward)
    handle = offload(model)
    for _ in range(3):
        testing.assert_bit_equal(model.step(x), moved.step(x))
    assert handle.stats().offloaded_bytes > 0


def test_under_autocast(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    offload(model)
    for _ in range(2):
        with torch.autocast(provider.device.type, torch.bfloat16):
            losses = [each(x).float().square().mean() for each in (model, moved)]
        for each, loss in zip((model, moved), losses, strict=True):
            each.zero_grad()
            loss.backward()
        testing.assert_bit_equal(model.gradients(), moved.gradients())


def test_several_backwards_through_one_graph(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    offload(model)
    for each in (model, moved):
        loss = each(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
    testing.assert_bit_equal(model.gradients(), moved.gradients())


def test_gradients_of_gradients(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    offload(model)
    for each in (model, moved):
        for _ in range(2):
            each.zero_grad()
            given = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(each(given).square().mean(), given, create_graph=True)
            first.square().sum().backward()
    testing.assert_bit_equal(model.gradients(), moved.gradients())


def test_accumulated_gradients_and_graphs_that_are_alive_together(
    provider: Provider, offload: Offload
) -> None:
    model, moved, x = pair(provider)
    offload(model)
    for each in (model, moved):
        losses = [each(x * scale).square().mean() for scale in (1, 2, 3)]
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
    testing.assert_bit_equal(model.gradients(), moved.gradients())


def test_graphs_that_are_dropped_free_what_they_saved(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    handle = offload(model)
    for _ in range(3):
        model(x)  # no backward

    def fail(*_: object) -> None:
        raise RuntimeError("in the midst of the backward")

    loss = model(x).square().mean()
    hooked = model(x)
    hooked.register_hook(fail)
    with pytest.raises(RuntimeError, match="midst"):
        hooked.sum().backward()
    del loss, hooked
    gc.collect()
    testing.assert_bit_equal(model.step(x), moved.step(x))
    assert handle.stats().live_leases == 0


def test_a_saved_tensor_that_is_written_is_refused_as_by_torch(provider: Provider, offload: Offload) -> None:
    def writes(model: Stack, x: Tensor) -> Tensor:
        for number, layer in enumerate(model.layers):
            y = torch.tanh(layer(x))  # tanh saves its result
            x = x + y
            if number == 2:
                y.add_(1)
        return x

    model, moved, x = pair(provider, writes)
    offload(model)
    for each in (model, moved):
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected"
        ):
            each(x).sum().backward()


@pytest.mark.parametrize("between", ["uninstall", "retune", "second install"])
def test_a_graph_outlives_its_plan(provider: Provider, offload: Offload, between: str) -> None:
    model, moved, x = pair(provider)
    handle = offload(model)
    testing.assert_bit_equal(model.step(x), moved.step(x))
    model.zero_grad()
    loss = model(x).square().mean()
    if between == "uninstall":
        handle.uninstall()
    elif between == "retune":
        handle.retune("64MiB")
    else:
        offload(model)
    loss.backward()
    found = model.gradients()
    testing.assert_bit_equal(found, moved.gradients())


def test_what_the_caller_still_has_is_not_moved_again(provider: Provider, offload: Offload) -> None:
    """What is alive when backward comes to it is used as it is, and stays in the next step."""
    kept: list[Tensor] = []

    def keeps(model: Stack, x: Tensor) -> Tensor:
        kept.clear()
        for layer in model.layers:
            x = x + torch.tanh(layer(x))
            kept.append(x)
        return x

    model, moved, x = pair(provider, keeps)
    handle = offload(model)
    moving = []
    for _ in range(3):
        testing.assert_bit_equal(model.step(x), moved.step(x))
        moving.append(handle.stats().offloaded_bytes)
        handle.reset_stats()
    assert moving[2] <= moving[0] - (LAYERS - 5) * ACTIVATION


def test_inputs_of_checkpointed_parts_leave(provider: Provider, offload: Offload) -> None:
    for forward in (reentrant, non_reentrant):
        model, moved, x = pair(provider, forward)
        handle = offload(model, 2 * ACTIVATION)
        for _ in range(2):
            testing.assert_bit_equal(model.step(x), moved.step(x))
        assert handle.stats().offloaded_bytes >= (LAYERS - 3) * ACTIVATION


def test_steps_of_different_lengths(provider: Provider, offload: Offload) -> None:
    model, moved, _ = pair(provider)
    handle = offload(model)
    for rows in (512, 300, 700, 1, 512, 40, 512):
        x = torch.randn(rows, WIDTH, device=provider.device)
        testing.assert_bit_equal(model.step(x), moved.step(x))
    assert handle.stats().saved_bytes <= LIMIT + 6 * ACTIVATION


def test_threads_train_their_own_models_and_one_together(provider: Provider, offload: Offload) -> None:
    model, moved, x = pair(provider)
    offload(model)

    def gradient(each: Stack, scale: int) -> list[Tensor]:
        given = (x * scale).requires_grad_()
        return [grad.cpu() for grad in torch.autograd.grad(each(given).square().mean(), given)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda scale: gradient(model, scale), range(1, 9)))
    for scale, each in enumerate(found, 1):
        testing.assert_bit_equal(each, gradient(moved, scale))


def test_wrong_options(provider: Provider, tmp_path: Path) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(dynswap_ext.ConfigError, match=message):
            provider.install(Stack(), **options)

    cpu = provider.device.type == "cpu"
    folder = {"activations_folder": tmp_path} if cpu else {}
    refused("and activations is not given", activations_folder=tmp_path)
    refused("activations", activations="lots", **folder)
    if not provider.native:
        refused("native provider", activations="1MiB", **folder)
    if cpu:
        refused("Pass activations_folder=", activations="1MiB")
        refused("expected a folder that exists", activations="1MiB", activations_folder=tmp_path / "none")
    refused("measured passes choose both or neither", activations="auto", **folder)
