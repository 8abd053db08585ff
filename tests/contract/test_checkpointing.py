"""Activation checkpointing: the forward runs again in the backward, and fetches its weights again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_moved, master_bytes, total
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import ConvNet, TinyTransformer, mlp

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def whole(model: nn.Module, x: torch.Tensor, *, reentrant: bool, **options: Any) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=reentrant, **options)


def layer_by_layer(model: nn.Module, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    for layer in model.children():
        x = checkpoint(layer, x, use_reentrant=reentrant)
    return x


def nested(model: nn.Module, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[1:3], y, use_reentrant=reentrant)

    def outer(y: torch.Tensor) -> torch.Tensor:
        return model[3:](checkpoint(inner, model[:1](y), use_reentrant=reentrant))

    return checkpoint(outer, x, use_reentrant=reentrant)


def in_segments(model: nn.Module, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return checkpoint_sequential(model, 2, x, use_reentrant=reentrant)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model: nn.Module, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    return whole(model, x, reentrant=False, context_fn=contexts)


def selective_of_all(model: nn.Module, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    """Keep the result of every operation, so torch refuses any in backward that forward did not have."""
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return whole(model, x, reentrant=False, context_fn=contexts)


WAYS = [whole, layer_by_layer, nested, in_segments, selective, selective_of_all]
reentrances = pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
ways = pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)


def step(model: nn.Module, run: Run, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the gradient of the input. Gradients of the masters stay on them."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = run(model, x)
    total(y).backward()
    assert x.grad is not None
    return y.detach(), x.grad


@reentrances
@ways
def test_gradients(provider: Provider, way: Callable[..., torch.Tensor], reentrant: bool) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(4, 16)
    run = partial(way, reentrant=reentrant)
    found, expected = step(model, run, x), step(moved, run, x)
    testing.assert_bit_equal(found, expected, "output and gradient of the input")
    assert_gradients_as_moved(model, moved)
    plain = step(moved, lambda m, v: m(v), x)
    testing.assert_bit_equal(found, plain, "output and gradient without a checkpoint")
    assert_moved(handle, model)


@reentrances
def test_dropout_is_drawn_again(provider: Provider, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5)).train()
    moved, _ = provider.pair(model)
    x = provider.randn(4, 16)
    found = []
    for m in (model, moved):
        torch.manual_seed(3)
        found.append(step(m, partial(layer_by_layer, reentrant=reentrant), x))
    testing.assert_bit_equal(found[0], found[1], "output and gradient of the input")
    assert_gradients_as_moved(model, moved)


@reentrances
def test_statistics_are_counted_as_often_as_in_the_moved_model(provider: Provider, reentrant: bool) -> None:
    model = ConvNet().train()
    moved, _ = provider.pair(model)
    x = provider.randn(4, 3, 8, 8)
    found = [step(m, partial(whole, reentrant=reentrant), x) for m in (model, moved)]
    testing.assert_bit_equal(found[0], found[1], "output and gradient of the input")
    state = moved.state_dict()
    for name, master in model.state_dict().items():
        # The second run of the forward starts from rounded statistics.
        torch.testing.assert_close(
            master.double(), state[name].double().cpu(), rtol=1e-6, atol=1e-6, msg=name
        )


def test_blocks_of_a_transformer(provider: Provider) -> None:
    model = TinyTransformer().train()
    moved, handle = provider.pair(model)
    tokens = torch.arange(12).reshape(2, 6).to(provider.device)

    def run(m: nn.Module) -> torch.Tensor:
        x = m.embed(tokens) + m.positions[m.order]
        for block in m.blocks:
            x = checkpoint(block, x, src_mask=m.mask, use_reentrant=False)
        return m.output(x)

    outputs = [run(m) for m in (model, moved)]
    testing.assert_bit_equal(outputs[0], outputs[1], "output")
    for output in outputs:
        total(output).backward()
    assert_gradients_as_moved(model, moved, close=True)
    assert_moved(handle, model)


@reentrances
def test_an_error_in_the_forward_that_runs_again(provider: Provider, reentrant: bool) -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Fails.calls += 1
            if Fails.calls == 2:
                raise ValueError("the second run's own error")
            return x * 1

    model = nn.Sequential(nn.Linear(16, 16), Fails(), nn.Linear(16, 16))
    moved, handle = provider.pair(model)
    x = provider.randn(4, 16)
    run = partial(whole, reentrant=reentrant)
    with pytest.raises(ValueError, match="own error"):
        step(model, run, x)
    found, expected = step(model, run, x), step(moved, run, x)
    testing.assert_bit_equal(found, expected, "output and gradient of the input")
    testing.assert_nothing_held(handle)


WIDTH, LAYERS = 256, 8
#: Bytes of one layer in float32, and what alignment may add to it.
LAYER = (WIDTH * WIDTH + WIDTH) * 4
SLACK = 2 * 4096


@reentrances
@pytest.mark.parametrize("way", [layer_by_layer, in_segments], ids=lambda f: f.__name__)
def test_the_budget_is_kept(
    provider: Provider,
    way: Callable[..., torch.Tensor],
    reentrant: bool,
    mapped: Callable[[nn.Module], nn.Module],
) -> None:
    model = mapped(mlp(WIDTH, LAYERS))
    # On the CPU, pure Python hands out mapped memory itself. With a cast, both providers stream.
    dtype = torch.float64 if provider.name == "python" else torch.float32
    budget = 4 * (LAYER + SLACK) * dtype.itemsize // 4
    moved, handle = provider.pair(model, dtype, budget=budget)
    x = provider.randn(4, WIDTH, dtype=dtype)
    run = partial(way, reentrant=reentrant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", _no_warning)
        for _ in range(2):
            found, expected = step(model, run, x), step(moved, run, x)
            testing.assert_bit_equal(found, expected, "output and gradient of the input")
            assert_gradients_as_moved(model, moved)
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    assert stats.peak_bytes <= budget
    # Each of two steps moves the model in forward and again in backward, less what stayed on the device.
    assert stats.bytes_moved >= 2 * master_bytes(model)


def _no_warning(message: Any, *args: Any, **kwargs: Any) -> None:
    category = args[0] if args else kwargs.get("category")
    assert category is not dynswap_ext.DynswapWarning, message
