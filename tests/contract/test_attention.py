"""Attention modules: their fused paths read the weights of submodules without calling them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle import assert_moved, assert_same_training_step
from torch import nn

from conftest import Provider, dense_alone_is_pretended
from dynswap_ext import testing

CASES: dict[str, Callable[[], nn.MultiheadAttention]] = {
    "packed": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "sequence first": lambda: nn.MultiheadAttention(8, 2),
    "without bias": lambda: nn.MultiheadAttention(8, 4, bias=False, batch_first=True),
    "bias_kv": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True),
    "zero_attn": lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True),
    "other dimensions": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True),
}


def padding_mask(provider: Provider) -> torch.Tensor:
    """Return the mask of three sequences of 4, 3 and 2 tokens."""
    return (torch.arange(4) >= torch.tensor([[4], [3], [2]])).to(provider.device)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("case", CASES)
def test_multihead_attention(provider: Provider, case: str, need_weights: bool) -> None:
    model = CASES[case]()
    moved, handle = provider.pair(model)
    query = provider.randn(3, 4, 8)
    key = provider.randn(3, 4, model.kdim, seed=1)
    value = provider.randn(3, 4, model.vdim, seed=2)

    def run(m: nn.Module) -> list[torch.Tensor]:
        return [y for y in m(query, key, value, need_weights=need_weights) if y is not None]

    assert_same_training_step(model.train(), moved.train(), run)
    with torch.no_grad():
        testing.assert_bit_equal(run(model.eval()), run(moved.eval()), "output in eval")
    assert_moved(handle, model)


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "per head"])
def test_self_attention_in_eval_with_masks(provider: Provider, average: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 4, 8)
    padding = padding_mask(provider)
    causal = torch.ones(4, 4, dtype=torch.bool, device=provider.device).triu(1)
    with torch.no_grad():
        for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": causal}):
            outputs = [m(x, x, x, average_attn_weights=average, **masks) for m in (model, moved)]
            testing.assert_bit_equal(outputs[0], outputs[1], f"output with {list(masks)}")
    assert_moved(handle, model)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[list[int]]:
    """Collect an entry for each call of a function while the block runs."""
    calls: list[int] = []
    function = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count)
        yield calls


def encoder(*, norm_first: bool = False, activation: str = "relu", layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, activation=activation
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoders_fast_path(
    provider: Provider, norm_first: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(norm_first=norm_first, activation=activation).eval()
    moved, handle = provider.pair(model, torch.float32 if provider.device.type != "cpu" else torch.float64)
    x = provider.randn(3, 4, 8, dtype=moved.layers[0].linear1.weight.dtype)
    with torch.no_grad(), counted(monkeypatch, torch, "_transformer_encoder_layer_fwd") as calls:
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x), "output")
    assert len(calls) == 8, "the fused path was not taken by both"
    if provider.device.type == "cpu":
        assert_moved(handle, model)


def test_nested_tensors_from_a_padding_mask(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    dense_alone_is_pretended("nested")
    model = encoder().eval()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 4, 8)
    padding = padding_mask(provider)
    with torch.no_grad(), counted(monkeypatch, torch, "_nested_tensor_from_mask") as calls:
        testing.assert_bit_equal(
            model(x, src_key_padding_mask=padding), moved(x, src_key_padding_mask=padding), "output"
        )
    assert len(calls) == 2, "no nested tensor was made"
    assert_moved(handle, model)


def test_a_nested_input(provider: Provider) -> None:
    dense_alone_is_pretended("nested")
    model = encoder().eval()
    moved, handle = provider.pair(model)
    x = torch.nested.nested_tensor([provider.randn(n, 8, seed=n) for n in (2, 4)])
    with torch.no_grad():
        y, expected = model(x), moved(x)
    testing.assert_bit_equal(list(y.unbind()), list(expected.unbind()), "output")
    assert_moved(handle, model)


@pytest.mark.parametrize("norm_first", [False, True], ids=["norm last", "norm first"])
def test_training_an_encoder(provider: Provider, norm_first: bool) -> None:
    model = encoder(norm_first=norm_first).train()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 4, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(4, provider.device, torch.float64)
    assert_same_training_step(model, moved, lambda m: m(x, mask=mask, is_causal=True))
    assert_moved(handle, model)


def test_eval_then_train_then_eval(provider: Provider) -> None:
    model = encoder()
    moved, _ = provider.pair(model)
    x = provider.randn(3, 4, 8)
    for training in (False, True, False):
        model.train(training)
        moved.train(training)
        with torch.set_grad_enabled(training):
            testing.assert_bit_equal(model(x), moved(x), f"output with training={training}")


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_decoder(provider: Provider, training: bool) -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(8)).train(training)
    moved, handle = provider.pair(model)
    x, memory = provider.randn(3, 4, 8), provider.randn(3, 5, 8, seed=1)
    assert_same_training_step(model, moved, lambda m: m(x, memory))
    with torch.no_grad():
        testing.assert_bit_equal(model(x, memory), moved(x, memory), "output without gradients")
    assert_moved(handle, model)
