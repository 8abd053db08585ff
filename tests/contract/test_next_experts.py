"""Experts of the next layer are prefetched before its router chooses, as long as guesses are mostly right."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import Provider
from dynswap_ext import Handle, testing
from dynswap_ext._swap import next_experts
from threads import in_threads

WIDTH, HIDDEN, EXPERTS, ACTIVE, LAYERS = 32, 64, 16, 2, 5
#: Every device has a grouped product in this dtype. Masters are cast to it, so that they are streamed on
#: the CPU, too.
DTYPE = torch.bfloat16


class Experts(nn.Module):
    """Experts as transformers computes them by default: rows sorted by expert, and a grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        flat, order = chosen.flatten().sort()
        ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).int()
        inner = F.silu(F.grouped_mm(x[order // ACTIVE], self.up.mT, offs=ends))
        out = F.grouped_mm(inner, self.down.mT, offs=ends)
        return out[order.argsort()].view(*chosen.shape, WIDTH).sum(1)


class Layer(nn.Module):
    def __init__(self, adds: float) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.adds = adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.adds * self.dense(x)
        chosen = self.gate(x).topk(ACTIVE, -1).indices
        return x + self.adds * self.experts(x, chosen)


def layers(adds: float, count: int = LAYERS) -> nn.Sequential:
    """Return layers that add `adds` times a result to their input.

    With a small factor, the next layer's choice can be guessed; with a large one, guesses are mere chance.
    """
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(adds) for _ in range(count)])


def quarter(model: nn.Module) -> int:
    """Return a quarter of the model's bytes on the device."""
    return sum(parameter.numel() for parameter in model.parameters()) * DTYPE.itemsize // 4


def run(provider: Provider, model: nn.Module, *, passes: int = 60, rows: int = 1, **options: Any) -> Handle:
    """Install the model and compare its outputs with a moved copy's. Return the handle.

    The handle's statistics are those of the second half of the passes.
    """
    moved = testing.moved(model, provider.device, DTYPE)
    handle = provider.install(model, dtype=DTYPE, **{"budget": quarter(model), **options})
    for step in range(passes):
        if step == passes // 2:
            handle.reset_stats()
        x = provider.randn(rows, WIDTH, dtype=DTYPE, seed=step)
        testing.assert_bit_equal(model(x), moved(x), f"pass {step}")
    return handle


def without_guesses(provider: Provider, adds: float, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Handle:
    with monkeypatch.context() as patched:
        patched.setattr("dynswap_ext._swap.expert_slices.following", lambda master: None)
        return run(provider, layers(adds), **more)


@torch.no_grad()
def test_experts_come_before_they_are_chosen(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers(0.02)
    stats = run(provider, model).stats()
    if not provider.native:
        assert stats.guesses == 0
        return
    plain = without_guesses(provider, 0.02, monkeypatch).stats()
    assert plain.guesses == 0 and plain.copies > 30
    assert stats.right_guesses >= 0.8 * stats.guesses
    assert stats.right_guesses >= 0.5 * plain.copies  # not of all: for the first layer nothing is guessed
    assert stats.bytes_moved <= 1.2 * plain.bytes_moved
    assert stats.peak_bytes <= quarter(model) and stats.overflow_bytes == 0


@torch.no_grad()
def test_guesses_that_are_wrong_are_left_out(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = run(provider, layers(30), passes=120).stats()
    if provider.native:
        plain = without_guesses(provider, 30, monkeypatch, passes=120).stats()
        assert stats.right_guesses < 0.5 * stats.guesses  # else this shows nothing
        assert stats.guesses < 0.15 * plain.copies
        assert stats.bytes_moved <= 1.1 * plain.bytes_moved
        assert stats.overflow_bytes == 0


@torch.no_grad()
def test_the_smallest_budget_moves_no_more(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = run(provider, layers(0.02), budget="minimum").stats()
    plain = without_guesses(provider, 0.02, monkeypatch, budget="minimum").stats()
    assert stats.bytes_moved <= 1.05 * plain.bytes_moved
    assert stats.overflow_bytes == plain.overflow_bytes


def test_nothing_is_guessed_with_gradients(provider: Provider) -> None:
    assert run(provider, layers(0.02), passes=6).stats().guesses == 0


@torch.no_grad()
def test_nothing_is_guessed_for_many_rows(provider: Provider) -> None:
    assert run(provider, layers(0.02), passes=6, rows=EXPERTS).stats().guesses == 0


@torch.no_grad()
def test_a_replaced_master_is_not_mistaken_for_the_old_one(provider: Provider) -> None:
    model = layers(0.02, 2)
    run(provider, model)
    with torch.no_grad():
        model[0].experts.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        model[1].gate.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
    x = provider.randn(1, WIDTH, dtype=DTYPE)
    testing.assert_bit_equal(model(x), testing.moved(model, provider.device, DTYPE)(x))
    assert next_experts.following(model[0].experts._parameters["down"]) is None


def test_threads_guess_beside_each_other(provider: Provider) -> None:
    model = layers(0.02)
    moved = testing.moved(model, provider.device, DTYPE)
    provider.install(model, dtype=DTYPE, budget=2 * quarter(model))

    def passes(seed: int) -> None:
        for step in range(10):
            x = provider.randn(1, WIDTH, dtype=DTYPE, seed=100 * seed + step)
            with torch.no_grad():
                testing.assert_bit_equal(model(x), moved(x))

    in_threads(passes, 2)


def test_nothing_is_left_of_a_model_that_is_gone(provider: Provider) -> None:
    gc.collect()
    before = len(next_experts._following)
    model = layers(0.02)
    provider.install(model, dtype=DTYPE, budget=quarter(model))
    assert len(next_experts._following) == before + (LAYERS - 1 if provider.native else 0)
    provider.handles.pop().uninstall()
    del model
    gc.collect()
    assert len(next_experts._following) == before


def called(model: nn.Module, provider: Provider, passes: int = 12, rows: int = 1) -> None:
    for step in range(passes):
        model(provider.randn(rows, WIDTH, dtype=DTYPE, seed=step))


@torch.no_grad()
def test_no_rows(provider: Provider) -> None:
    run(provider, layers(0.02), passes=6, rows=0)


class Holding(Layer):
    """Holds its largest weights while its experts compute, so that the smallest budget has no room left."""

    def __init__(self, adds: float) -> None:
        super().__init__(adds)
        self.last = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.last, self.dense.weight, self.gate.weight
        x = super().forward(x)
        return x + 0.001 * sum((x @ weight.reshape(WIDTH, -1))[:, :1] for weight in held)


@torch.no_grad()
def test_a_router_takes_no_memory_beyond_the_budget(provider: Provider) -> None:
    model = nn.Sequential(*[Holding(0.02) for _ in range(LAYERS)])
    options = {"dtype": DTYPE, "budget": "minimum"} if provider.native else {"dtype": DTYPE}
    handle = provider.install(model, strict_budget=True, **options)
    called(model, provider)
    assert handle.stats().overflow_bytes == 0


@torch.no_grad()
def test_a_router_that_this_install_does_not_serve(provider: Provider) -> None:
    model = layers(0.02)
    provider.install(model, dtype=DTYPE, budget=quarter(model))
    called(model, provider)
    provider.handles.pop().uninstall()
    run(provider, model[0], passes=4, budget=80 * 1024)  # the next layer's router is where it was


@torch.no_grad()
def test_a_router_that_is_left_alone(provider: Provider) -> None:
    class OnCpu(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to("cpu", self.weight.dtype)).to(x)

    model = layers(0.02, 3)
    model[1].gate = OnCpu(WIDTH, EXPERTS, bias=False)
    provider.install(model, dtype=DTYPE, budget=quarter(model), ignore="1.gate")
    called(model, provider)


class Wide(nn.Linear):
    """A router that scores more experts than there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., :EXPERTS]


@torch.no_grad()
def test_a_router_that_names_experts_which_are_not_there(provider: Provider) -> None:
    model = layers(0.02, 2)
    model[1].gate = Wide(WIDTH, EXPERTS, bias=False)
    run(provider, model, passes=2)
    model[1].gate.weight = nn.Parameter(torch.randn(4 * EXPERTS, WIDTH))
    called(model, provider)


@torch.no_grad()
def test_a_router_that_cannot_be_read_and_is_not_needed(provider: Provider, tmp_path: Path) -> None:
    model = layers(0.02, 3)
    model[2].forward = lambda x: x
    testing.map_from_file(model[2].gate, tmp_path / "router.pt")
    provider.install(model, dtype=DTYPE, budget=quarter(model))
    os.truncate(tmp_path / "router.pt", 0)
    called(model, provider)


@pytest.mark.parametrize(
    "beside",
    [
        nn.UninitializedParameter,
        lambda: nn.Parameter(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])),
    ],
    ids=["lazy", "nested"],
)
def test_parameters_without_a_shape_beside_experts(
    provider: Provider, beside: Callable[[], nn.Parameter]
) -> None:
    model = layers(0.02, 2)
    budget = quarter(model)
    fused = dict(model[0].experts._parameters)
    model[0].experts._parameters.clear()
    model[0].experts.register_parameter("beside", beside())
    model[0].experts._parameters.update(fused)
    provider.install(model, dtype=DTYPE, budget=budget)
    with torch.no_grad():
        called(model, provider)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_modes_see_no_guess(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    x = provider.randn(1, WIDTH, dtype=DTYPE)

    def seen() -> Counter[str]:
        model = layers(0.02, 3)
        handle = provider.install(model, dtype=DTYPE, budget=quarter(model))
        called(model, provider)
        with Seen() as mode:
            model(x)
        handle.uninstall()
        return mode.operators

    with_guesses = seen()
    monkeypatch.setattr("dynswap_ext._swap.expert_slices.following", lambda master: None)
    assert with_guesses == seen()
