"""Attribute lookup: a class's own ways are kept, dictionaries hold masters, and a probe costs no prefetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp


def test_a_wrapper_that_looks_up_in_what_it_wraps(provider: Provider) -> None:
    """A `__getattr__` that looks up missing attributes in a wrapped model works, as in PEFT's models."""

    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.adapter = nn.Parameter(torch.randn(4))  # before there is anything to look it up in
            self.base_model = base

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name == "base_model":
                    raise
                return getattr(self.base_model, name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias) * self.adapter

    model = Wrapper(Wrapper(nn.Linear(4, 4)))
    moved, _ = provider.pair(model)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x), moved(x))
    weight = model.weight
    assert weight is model.base_model.base_model.weight and weight.dtype == torch.float64
    assert model.in_features == 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    del model._modules["base_model"]
    with pytest.raises(AttributeError, match="base_model"):
        _ = model.weight


def test_names_that_the_class_defines_itself(provider: Provider) -> None:
    class Own(nn.Linear):
        scale = 3  # hides the buffer of this name, with a plain module too

        def __init__(self) -> None:
            super().__init__(4, 4)
            self.raw = nn.Parameter(torch.randn(4))
            self._buffers["scale"] = torch.ones(4)
            self._buffers["doubled"] = torch.ones(4)

        @property
        def doubled(self) -> torch.Tensor:
            return self.raw * 2

        @property
        def broken(self) -> torch.Tensor:
            return self.nothing

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.doubled * self.scale

    model = Own()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x), moved(x))
    assert model.scale == 3
    testing.assert_bit_equal(model.doubled.detach(), moved.doubled.detach())
    messages = []
    for m in (model, moved):
        with pytest.raises(AttributeError) as raised:
            _ = m.broken
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_slots(provider: Provider) -> None:
    class Slotted(nn.Linear):
        __slots__ = ("cache", "seen")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = getattr(self, "seen", 0) + 1
            self.cache = super().forward(x)
            return self.cache

    model = Slotted(4, 4)
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(2, 4)
    handle = provider.install(model, dtype=torch.float64)
    for _ in range(2):
        testing.assert_bit_equal(model(x), moved(x))
    assert model.seen == 2 and "seen" not in model.__dict__
    handle.uninstall()
    assert type(model) is Slotted and model.seen == 2
    del model.cache
    assert not hasattr(model, "cache")


def test_a_forward_that_reads_its_dictionaries_sees_masters(provider: Provider) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("b", torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = [self._parameters["w"], next(self.parameters()), self._buffers["b"], *self.buffers()]
            self.seen.append(dict(self.named_parameters())["w"])
            # As transformers' `model.dtype` reads it: the dtype and device of the compute.
            self.found = next(self.parameters()).dtype, next(self.parameters()).device
            w = self._parameters["w"].to(x)
            return x @ w + self.b

    model = Reads()
    masters = model.w, model.b
    moved, _ = provider.pair(model)
    x = provider.randn(2, 4)
    y = model(x)
    testing.assert_bit_equal(y, moved(x))
    y.sum().backward()
    assert [value is masters[i] for value, i in zip(model.seen, (0, 0, 1, 1, 0), strict=True)] == [True] * 5
    assert model.found == (moved.w.dtype, moved.w.device)
    assert masters[0].grad is not None and masters[0].grad.dtype == torch.float32


PROBES: dict[str, Callable[[list[nn.Module]], object]] = {
    "hasattr": lambda ms: [hasattr(m, "weight") for m in ms],
    "shape, dtype, device": lambda ms: [(m.weight.shape, m.weight.dtype, m.weight.device) for m in ms],
    "backwards": lambda ms: [m.weight.shape for m in reversed(ms)],
    "the first": lambda ms: ms[0].weight.device,
    "one in the middle": lambda ms: ms[4].weight.dtype,
    "twice": lambda ms: [getattr(m, "bias", None) is not None for m in ms * 2],
}


@pytest.mark.parametrize("probe", PROBES)
def test_probes_between_passes_unlearn_nothing(provider: Provider, probe: str) -> None:
    layers = 8
    model = mlp(64, layers).eval()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 64)

    def passed() -> tuple[int, int]:
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
        stats = handle.stats()
        return stats.misses, stats.bytes_moved

    with torch.no_grad():
        for _ in range(3):
            learned = passed()
        PROBES[probe]([m for m in model if isinstance(m, nn.Linear)])
        misses, bytes_moved = passed()
        # The step from the probe to the first layer is new: one miss, and some weights prefetched in vain.
        assert misses <= learned[0] + 1
        assert bytes_moved <= learned[1] * (1 + 3 / layers)
        assert passed() == learned


def test_a_call_of_what_the_name_call_has_is_a_call_of_the_module(provider: Provider) -> None:
    """As `model(x)` is, and not one of each of its children. transformers' `generate` calls by this name."""
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 16)
    expected = model(x)
    call = model.__call__
    with handle.record():
        testing.assert_bit_equal(model.__call__(x), expected)
        testing.assert_bit_equal(call(x), expected)
    assert sum(1 for _ in handle._recorder.last.of("pass")) == 2
    handle.uninstall()
    x = x.cpu().float()
    testing.assert_bit_equal(call(x), model(x))


def test_a_call_that_calls_that_of_the_class_below(provider: Provider) -> None:
    called = []

    class Counting(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self)
            return super().__call__(*args, **kwargs)

    model = Counting(4, 4)
    moved, _ = provider.pair(model)

    class Derived(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    x = provider.randn(2, 4)
    expected = moved(x)
    called.clear()
    testing.assert_bit_equal(model(x), expected)
    testing.assert_bit_equal(model.__call__(x), expected)
    assert called == [model, model]
    model.__class__ = Derived
    testing.assert_bit_equal(model(x), expected)
    testing.assert_bit_equal(model.__call__(x), expected)
    assert called == [model] * 4
