"""Installed models with GGUF masters: blocks are copied, and decoded on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sample_gguf import random_weight, write_gguf
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import checkpoint, testing
from dynswap_ext.checkpoint.gguf import GGUFTensor
from dynswap_ext.checkpoint.gguf_tensors import tensor as gguf_tensor
from sample_models import trace

WIDTH, LAYERS, WORDS = 256, 6, 32
ENCODINGS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K", "IQ4_XS")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.embedding(indices))
        return out


@pytest.fixture
def model(tmp_path: Path) -> Any:
    tensors: dict[str, torch.Tensor] = {"embedding.weight": random_weight("Q6_K", WORDS, WIDTH)}
    for i, encoding in enumerate(ENCODINGS):
        tensors[f"layers.{i}.weight"] = random_weight(encoding, WIDTH, WIDTH, seed=i)
        tensors[f"layers.{i}.bias"] = torch.randn(WIDTH)
    return checkpoint.load(Net, write_gguf(tmp_path / "w.gguf", tensors)).eval()


def stored_bytes(model: nn.Module) -> int:
    return sum(p.blocks.nbytes if isinstance(p, GGUFTensor) else p.nbytes for p in model.parameters())


def indices(provider: Provider) -> torch.Tensor:
    return torch.arange(12, device=provider.device).reshape(2, 6)


def streams(provider: Provider) -> bool:
    """Return whether the engine moves payloads. Pure Python moves a subclass whole, by its own .to()."""
    return provider.native


@pytest.mark.parametrize("budget", ["2MiB", 160_000], ids=["resident", "streamed"])
def test_outputs_are_those_of_the_resident_model(provider: Provider, model: Any, budget: str | int) -> None:
    moved = testing.moved(model, provider.device)
    stored = stored_bytes(model)
    handle = provider.install(model, budget=budget)
    with torch.no_grad():
        for _ in range(3):
            testing.assert_bit_equal(model(indices(provider)), moved(indices(provider)))
    stats = handle.stats()
    assert stats.overflow_bytes == 0 and stats.peak_bytes <= handle.budget
    assert stats.weight_bytes < 1.1 * stored
    if streams(provider):
        if budget == "2MiB":
            assert stats.bytes_moved == stored  # each once
        else:
            assert stored < stats.bytes_moved <= 4 * stored  # three passes, and the prefetch for another


def test_nothing_is_decoded_on_the_way(
    provider: Provider, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[torch.device] = []

    def decode(blocks: torch.Tensor, *rest: Any) -> torch.Tensor:
        decoded.append(blocks.device)
        return original(blocks, *rest)

    original = gguf_tensor.decode
    monkeypatch.setattr(gguf_tensor, "decode", decode)
    provider.install(model, budget=160_000)
    weight, master = model.layers[0].weight, model.layers[0]._parameters["weight"]
    assert isinstance(weight, GGUFTensor) and isinstance(weight, nn.Parameter)
    assert weight.encoding == "Q4_K" and weight.device == weight.blocks.device == provider.device
    testing.assert_bit_equal(weight.blocks.cpu(), master.blocks)
    assert decoded == []
    del weight
    with torch.no_grad():
        model(indices(provider))
    assert decoded == [provider.device] * (LAYERS + 1)


def test_a_cast_is_one_of_the_values(provider: Provider, model: Any) -> None:
    moved = testing.moved(model, provider.device, torch.bfloat16)
    stored = stored_bytes(model)
    handle = provider.install(model, dtype=torch.bfloat16, budget=160_000)
    assert model.layers[0].weight.dtype == torch.bfloat16
    assert model.layers[0].weight.blocks.dtype == torch.uint8
    with torch.no_grad():
        for _ in range(2):
            out = model(indices(provider))
            testing.assert_bit_equal(out, moved(indices(provider)))
    assert out.dtype == torch.bfloat16
    if streams(provider):
        assert handle.stats().bytes_moved <= 4 * stored


def test_gradients_reach_what_is_trained(provider: Provider, model: Any) -> None:
    moved = testing.moved(model, provider.device)
    provider.install(model, budget=160_000)
    for net in (model, moved):
        net(indices(provider)).square().mean().backward()
    for module, other in zip(model.layers, moved.layers, strict=True):
        testing.assert_bit_equal(module._parameters["bias"].grad.cpu(), other.bias.grad.cpu())
        assert module._parameters["weight"].grad is None


def test_state_and_uninstall(provider: Provider, model: Any, tmp_path: Path) -> None:
    before = trace(model)
    provider.install(model, budget=160_000)
    with torch.no_grad():
        expected = model(indices(provider))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    dynswap_ext.uninstall(model)
    assert trace(model) == before
    loaded = checkpoint.load(Net, tmp_path / "w.pt").eval()
    assert isinstance(loaded.layers[0].weight, GGUFTensor)
    provider.install(loaded, budget=160_000)
    with torch.no_grad():
        testing.assert_bit_equal(loaded(indices(provider)), expected)
