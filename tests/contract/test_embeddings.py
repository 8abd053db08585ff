"""Embeddings: rows read by index, sparse gradients, and a forward that writes its weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import assert_moved, assert_same_training_step, master_bytes
from torch import nn

from conftest import Provider, dense_alone_is_pretended
from dynswap_ext import testing

INDICES = torch.tensor([[1, 3, 0], [3, 5, 1]])


@pytest.mark.parametrize("padding_idx", [None, 0, -1], ids=["no padding", "padding 0", "padding -1"])
@pytest.mark.parametrize("scale", [False, True], ids=["plain", "by frequency"])
def test_an_embedding(provider: Provider, padding_idx: int | None, scale: bool) -> None:
    model = nn.Embedding(6, 4, padding_idx=padding_idx, scale_grad_by_freq=scale)
    moved, handle = provider.pair(model)
    tokens = INDICES.to(provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens))
    if padding_idx is not None:
        assert model.get_parameter("weight").grad[padding_idx].tolist() == [0] * 4
    assert_moved(handle, model)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_embedding_bag(provider: Provider, mode: str) -> None:
    model = nn.EmbeddingBag(6, 4, mode=mode, padding_idx=0)
    moved, handle = provider.pair(model)
    tokens = INDICES.to(provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens))
    offsets = torch.tensor([0, 2], device=provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens.flatten(), offsets))
    assert_moved(handle, model)


def test_per_sample_weights(provider: Provider) -> None:
    model = nn.EmbeddingBag(6, 4, mode="sum", include_last_offset=True)
    moved, handle = provider.pair(model)
    tokens, scales = INDICES.flatten().to(provider.device), provider.randn(6)
    offsets = torch.tensor([0, 2, 6], device=provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens, offsets, per_sample_weights=scales))
    assert_moved(handle, model)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Embedding(6, 4, sparse=True), lambda: nn.EmbeddingBag(6, 4, mode="sum", sparse=True)],
    ids=["embedding", "bag"],
)
def test_sparse_gradients_and_a_sparse_optimizer(provider: Provider, make: Callable[[], nn.Module]) -> None:
    dense_alone_is_pretended("sparse")
    model = make()
    plain = testing.moved(model, provider.device)
    handle = provider.install(model, dtype=torch.float64)
    tokens = INDICES.to(provider.device)
    optimizers = [torch.optim.SparseAdam(list(m.parameters()), lr=0.1) for m in (model, plain)]
    for _ in range(2):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(tokens).square().sum().backward()
            optimizer.step()
    grad = model.get_parameter("weight").grad
    assert grad.is_sparse
    assert grad.dtype == torch.float32
    torch.testing.assert_close(
        model.state_dict()["weight"], plain.weight.detach().cpu(), rtol=1e-5, atol=1e-6
    )
    assert handle.stats().bytes_moved >= 2 * master_bytes(model)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Embedding(6, 4, max_norm=1.0), lambda: nn.EmbeddingBag(6, 4, max_norm=1.0, mode="sum")],
    ids=["embedding", "bag"],
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_max_norm_writes_the_master(
    provider: Provider, make: Callable[[], nn.Module], training: bool, budget: str | None
) -> None:
    model = make().train(training)
    with torch.no_grad():
        model.get_parameter("weight").mul_(10)
    moved, handle = provider.pair(model, budget=budget)
    before = model.state_dict()["weight"].clone()
    tokens = INDICES.to(provider.device)
    with torch.no_grad():
        testing.assert_bit_equal(model(tokens), moved(tokens), "output")
    after = model.state_dict()["weight"]
    testing.assert_bit_equal(after, moved.weight.detach().cpu().float(), "the master")
    used = sorted(set(INDICES.flatten().tolist()))
    assert (after[used].norm(dim=1) <= 1 + 1e-6).all()
    unused = [i for i in range(6) if i not in used]
    testing.assert_bit_equal(after[unused], before[unused], "rows not used")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), moved(tokens), rtol=1e-6, atol=1e-6)
    assert_moved(handle, model)


def test_max_norm_in_training(provider: Provider) -> None:
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 3))
    moved, handle = provider.pair(model)
    tokens = INDICES.to(provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens))
    testing.assert_bit_equal(
        model.state_dict()["0.weight"], moved[0].weight.detach().cpu().float(), "the master"
    )
    assert_moved(handle, model)


def test_from_pretrained_and_a_tied_output(provider: Provider) -> None:
    model = nn.Sequential(
        nn.Embedding.from_pretrained(torch.randn(6, 4), freeze=False), nn.Linear(4, 6, bias=False)
    )
    model[1].weight = model[0].weight
    moved, handle = provider.pair(model)
    tokens = INDICES.to(provider.device)
    assert_same_training_step(model, moved, lambda m: m(tokens), close=True)
    assert_moved(handle, model)
