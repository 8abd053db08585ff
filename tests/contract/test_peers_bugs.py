"""Bugs of other projects' offloading that must not happen here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp


@pytest.mark.parametrize("layers", [3, 5, 7])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_a_ring_that_does_not_divide_the_layers(provider: Provider, layers: int, prefetch: int) -> None:
    """No weight is overwritten while forward or backward reads it, as in vLLM 54975 and ai-toolkit 1002."""
    model = mlp(features=64, layers=layers)
    moved, handle = provider.pair(model, prefetch=prefetch)
    for seed in range(4):
        x = provider.randn(3, 64, seed=seed)
        y, expected = model(x), moved(x)
        testing.assert_bit_equal(y, expected, "output")
        y.sum().backward()
        expected.sum().backward()
    for master, other in zip(model.parameters(), moved.parameters(), strict=True):
        assert master.grad is not None and other.grad is not None
        torch.testing.assert_close(master.grad, other.grad.cpu().float(), rtol=1e-5, atol=1e-5)
    assert handle.stats().bytes_moved > 0


def test_two_files_with_the_same_names(provider: Provider, tmp_path: Path) -> None:
    """Two models from files with the same names keep their own weights.

    In diffusers and accelerate, the second model ran with the weights of the first.
    """
    models = [testing.map_from_file(mlp(features=64).eval(), tmp_path / f"{i}.pt") for i in range(2)]
    moved = [testing.moved(model, provider.device) for model in models]
    for model in models:
        provider.install(model)
    x = provider.randn(2, 64, dtype=torch.float32)
    with torch.no_grad():
        for _ in range(2):
            for model, other in zip(models, moved, strict=True):
                testing.assert_bit_equal(model(x), other(x))
    assert not torch.equal(moved[0](x), moved[1](x))


def test_the_file_is_not_opened_again(
    provider: Provider, mapped: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    """After the install, no file is opened.

    accelerate and compressed-tensors opened a safetensors file for each tensor at each access.
    """
    model = mapped(mlp(features=64).eval())
    moved = testing.moved(model, provider.device)
    provider.install(model)
    (tmp_path / "model.pt").unlink()
    x = provider.randn(2, 64, dtype=torch.float32)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
        files = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    assert len(os.listdir("/proc/self/fd") if files else []) == len(files)


class Branches(nn.Module):
    """Runs only the parts in `order`, which need not be in the order of their definition."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = torch.tanh(self.gate(x))
        for index in order:
            x = x + torch.tanh(self.parts[index](x))
        return x


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_parts_that_are_skipped_and_in_another_order(provider: Provider, prefetch: int) -> None:
    """Parts may be skipped, or run in another order than defined (diffusers 13211, 11307, 11375)."""
    model = Branches().eval()
    moved, handle = provider.pair(model, prefetch=prefetch)
    generator = torch.Generator().manual_seed(3)
    x = provider.randn(2, 64)
    orders = [[5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0], [0], [], [3, 3, 3], [5, 4, 3, 2, 1, 0]]
    orders += [torch.randperm(6, generator=generator)[:3].tolist() for _ in range(20)]  # experts
    with torch.no_grad():
        for order in orders:
            testing.assert_bit_equal(model(x, order), moved(x, order), f"output for {order}")
    assert handle.stats().bytes_moved > 0


def test_a_mismatch_does_not_end_prefetching(provider: Provider) -> None:
    """Unexpected parts in one call do not end prefetching, as in DeepSpeed 4808."""
    if not provider.native:
        pytest.skip("the pure-Python provider does not prefetch")
    model = Branches().eval()
    _, handle = provider.pair(model, prefetch=2)
    x = provider.randn(2, 64)
    usual = [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        for order in (usual, usual, usual):
            model(x, order)
        for surprise in ([0, 1, 3, 2, 4, 5], [5, 1, 3], [2]):
            model(x, surprise)
            model(x, usual)
            handle.reset_stats()
            model(x, usual)
            stats = handle.stats()
            assert stats.misses == 0 and stats.prefetches > 0, surprise


def low_rank(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 2, generator=generator) @ torch.randn(2, 16, generator=generator)


FUSE: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "attribute's data": lambda module, delta: module.weight.data.add_(delta.to(module.weight)),
    "attribute's data, assigned": lambda module, delta: setattr(
        module.weight, "data", module.weight.data + delta.to(module.weight)
    ),
    "attribute": lambda module, delta: torch.no_grad()(module.weight.add_)(delta.to(module.weight)),
    "master's data": lambda module, delta: module.get_parameter("weight").data.add_(delta),
    "master": lambda module, delta: torch.no_grad()(module.get_parameter("weight").add_)(delta),
}


def fuse_in_place(module: Any, delta: torch.Tensor) -> None:
    module.weight.data += delta.to(module.weight)  # reads, adds in place, and assigns the same tensor


FUSE["attribute's data, +="] = fuse_in_place


@pytest.mark.parametrize("budget", [None, "1MiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("way", FUSE)
def test_a_lora_is_fused_once(provider: Provider, way: str, budget: str | None) -> None:
    """A LoRA is added exactly once, also when another takes its place.

    In other projects it was added twice, or images turned black with the next LoRA.
    """
    model = mlp()
    plain = testing.moved(model)
    provider.pair(model, budget=budget)
    x = provider.randn(2, 16)
    for seed, sign in ((1, 1), (1, -1), (2, 1)):
        for index in (0, 2):
            FUSE[way](model[index], sign * low_rank(seed))
            with torch.no_grad():
                plain[index].weight += sign * low_rank(seed)
        moved = testing.moved(plain, provider.device, torch.float64)
        # The sum is rounded to the master's dtype once either way, but from sums of other precision.
        torch.testing.assert_close(model(x), moved(x), rtol=1e-5, atol=1e-5)
    dynswap_ext.uninstall(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-5)
