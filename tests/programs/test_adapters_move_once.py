"""Adapters that come and go do not cause weights that stay on the device to be moved again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from conftest import Provider
from dynswap_ext import testing
from programs import library, llama

peft = library("peft")

LAYERS = 6
#: The calls after which a new adapter is in the plan. Until then, it is moved at each read.
PLANNED = 4
#: The most times that an adapter is moved in these calls.
READ_UNPLANNED = 6


def base() -> Any:
    return llama(num_hidden_layers=LAYERS).eval()


def add(model: Any, name: str) -> int:
    """Add an adapter whose masters are in RAM, in float32; return the number of its elements."""
    torch.manual_seed(len(name))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter(config, adapter_name=name)
    elements = 0
    for key, master in model.named_parameters():
        if f".{name}." in key:
            master.data = master.data.to("cpu", torch.float32)
            elements += master.numel()
    return elements


class ModelPair:
    """A plain model in float64, and the same model installed. Each step calls both."""

    def __init__(self, provider: Provider, budget: float) -> None:
        self.plain = testing.move(base(), provider.device, torch.float64)
        self.model = base()
        self.whole = sum(master.numel() * 8 for master in self.model.parameters())
        self.budget = int(budget * self.whole)
        self.handle = provider.install(self.model, dtype=torch.float64, budget=self.budget)
        self.counted: int = 0
        self.ids = torch.arange(8, device=provider.device)[None]

    def both(self) -> Iterator[Any]:
        yield self.plain
        yield self.model

    def add(self, name: str) -> int:
        elements = [add(model, name) for model in self.both()]
        for key, parameter in self.plain.named_parameters():
            if f".{name}." in key:
                parameter.data = parameter.data.to(self.ids.device, torch.float64)
        return elements[0]

    def delete(self, name: str) -> None:
        for model in self.both():
            model.delete_adapter(name)

    def residents(self) -> dict[tuple[str, ...], int]:
        """Return the bytes that this plan has moved for each group that stays, by its weights' names."""
        return {
            tuple(name.replace(".base_layer", "") for name in row.names): row.bytes_moved
            for row in self.handle.report().rows
            if row.resident
        }

    def moved(self, calls: int = 1) -> int:
        """Call both models and compare; return the bytes that were moved since the last such call."""
        for _ in range(calls):
            with torch.no_grad():
                testing.assert_bit_equal(self.model(self.ids).logits, self.plain(self.ids).logits, "logits")
        stats = self.handle.stats()
        assert stats.peak_bytes <= self.budget
        assert stats.overflow_bytes == 0
        moved = stats.bytes_moved - self.counted
        self.counted = stats.bytes_moved
        return moved


@pytest.fixture(autouse=True)
def only_native(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python fetches what stays once more with each new plan")


def test_with_room_for_all_only_adapters_are_moved(provider: Provider) -> None:
    """Adapters are moved, and nothing else."""
    beside = ModelPair(provider, budget=2)
    assert beside.moved() > 0
    assert beside.moved() == 0
    weights = [beside.handle.stats().weight_bytes]
    for name in ("red", "yellow"):
        elements = beside.add(name)
        assert elements * 4 <= beside.moved(PLANNED) <= READ_UNPLANNED * elements * 4
        assert beside.moved() == 0
        weights.append(beside.handle.stats().weight_bytes)
    assert weights == sorted(set(weights)), "they have joined the plan"
    for model in beside.both():
        model.set_adapter("red")
    assert beside.moved() == 0
    for name in ("yellow", "red"):
        beside.delete(name)
        assert beside.moved(PLANNED) == 0
    assert beside.handle.stats().weight_bytes == weights[0]


@pytest.mark.parametrize("budget", [0.55, 0.75])
def test_residents_of_a_small_budget_are_not_moved(provider: Provider, budget: float) -> None:
    """Weights that stay are not moved for the plans that are made as adapters come and go."""
    beside = ModelPair(provider, budget)
    beside.moved(2)
    stay = beside.residents()
    assert stay

    def made(change: Callable[[], object]) -> None:
        nonlocal stay
        planned = beside.handle.stats().weight_bytes
        change()
        beside.moved(PLANNED)
        assert beside.handle.stats().weight_bytes != planned, "there is a plan with it, or without"
        now = beside.residents()
        # One weight may have to make room for streamed groups, which are larger now.
        assert len(stay.keys() - now.keys()) <= 1
        assert sum(now[names] for names in stay.keys() & now.keys()) == 0
        stay = now

    for name in ("red", "yellow"):
        made(partial(beside.add, name))
    for name in ("red", "yellow"):
        made(partial(beside.delete, name))


def test_what_was_written_is_moved_again(provider: Provider) -> None:
    """Written masters are moved again, even if the write bumped no version and an adapter came then."""
    beside = ModelPair(provider, budget=2)
    beside.moved()
    written = 0
    for model in beside.both():
        for name, master in model.named_parameters():
            if "v_proj" in name:
                master.data.mul_(2)
                written += master.numel() * 2  # in both
    beside.add("red")
    assert written <= beside.moved(PLANNED)


def test_what_is_held_is_moved_again(provider: Provider) -> None:
    """A weight that the program holds during a new plan is moved again after a write on the held tensor.

    The write reaches the master and the model.
    """
    beside = ModelPair(provider, budget=2)
    beside.moved()
    held = [model.lm_head.weight for model in beside.both()]
    beside.add("red")
    beside.moved()
    for tensor in held:
        tensor.data.mul_(2)
    beside.moved()
    del held, tensor
    beside.moved()
