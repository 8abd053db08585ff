"""Inspecting leaves no trace: hooks, modes, random numbers, an install's schedule; after errors too."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.inspect import memory_profile, summary
from sample_models import ConvNet, TinyTransformer, mlp, trace

Look = Callable[[nn.Module, torch.Tensor], Any]
LOOKS = [
    pytest.param(lambda model, x: summary(model, input_data=x), id="summary"),
    pytest.param(lambda model, x: memory_profile(model, input_data=x), id="memory_profile"),
]
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
)


def hooks(model: nn.Module) -> list[Any]:
    return [{name: dict(getattr(module, name)) for name in HOOKS} for module in model.modules()]


class Fails(nn.Module):
    """A model with a frozen part, a user's hook, and an error in its middle."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.layers = mlp()
        self.frozen = nn.Dropout().eval()
        self.error = error
        self.layers[0].register_forward_hook(lambda module, args, output: output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.layers[:2](x))
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "error", [None, ValueError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_nothing_stays(provider: Provider, look: Look, error: BaseException | None) -> None:
    model = Fails(error)
    plain = trace(model)
    handle = provider.install(model, dtype=torch.float64)
    before = trace(model), hooks(model), [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1]
    with torch.enable_grad():
        if error is None:
            look(model, provider.randn(2, 16))
        else:
            with pytest.raises(type(error)):
                look(model, provider.randn(2, 16))
        assert torch.is_grad_enabled()
    assert (trace(model), hooks(model), [module.training for module in model.modules()]) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1] and (numpy.random.get_state()[1] == states[2]).all()
    testing.assert_nothing_held(handle)
    handle.uninstall()
    assert trace(model) == plain


@pytest.mark.parametrize("look", LOOKS)
def test_random_numbers_go_on_as_if_nothing_had_been(provider: Provider, look: Look) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random(), numpy.random.rand()
            return self.layer(x) + torch.rand(4, device=x.device)

    model, x = Draws(), provider.randn(2, 4)
    provider.install(model, dtype=torch.float64)

    def draw() -> tuple[Any, ...]:
        return float(torch.rand(1, device=provider.device)), random.random(), float(numpy.random.rand())

    def seed() -> None:
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)

    seed()
    expected = draw()
    seed()
    look(model, x)
    assert draw() == expected


def test_summary_does_not_train() -> None:
    model = ConvNet().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    model.norm.register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    summary(model, (2, 3, 5, 5))
    assert seen == [(False, False)] and model.norm.training
    testing.assert_bit_equal(dict(model.state_dict()), before)


def test_a_train_method_of_the_models_own_is_not_called() -> None:
    class Merges(nn.Linear):
        def train(self, mode: bool = True) -> Merges:
            raise AssertionError

    assert summary(Merges(2, 2), (1, 2)).layers[0].calls == 1


def _forward_with_other_hooks(model: nn.Module, x: torch.Tensor) -> None:
    hooks = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    model(x)
    for hook in hooks:
        hook.remove()


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("budget", [None, "16KiB", "1MiB"])
def test_an_install_counts_it_as_a_forward(
    provider: Provider, look: Look, budget: str | None, mapped: Any
) -> None:
    """An install counts an inspection as a forward with hooks, which turn off torch's fused path."""
    model = mapped(TinyTransformer()).eval()
    x = torch.zeros(2, 6, dtype=torch.long, device=provider.device)

    def figures(run: Look) -> list[tuple[int, ...]]:
        with provider.install(model, dtype=torch.float64, budget=budget) as handle, torch.no_grad():
            model(x), model(x)
            found = []
            for run_now in (run, nn.Module.__call__):  # and the one after it
                handle.reset_stats()
                run_now(model, x)
                stats = handle.stats()
                found.append((stats.hits, stats.misses, stats.bytes_moved, stats.live_leases))
            return found

    expected = figures(_forward_with_other_hooks)
    assert figures(look) == expected
    assert expected[0][2] > 0 or budget == "1MiB"


@pytest.mark.parametrize("look", LOOKS)
def test_calls_of_other_threads_are_not_seen(look: Look) -> None:
    import threading

    class Spawns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=self.layer, args=(x,))
            other.start()
            other.join()
            return x

    found = look(Spawns(), torch.ones(2, 4))
    rows = found.layers if hasattr(found, "layers") else found.calls
    assert [row.path for row in rows if getattr(row, "calls", 1)] == [""]


def test_a_module_that_fails_and_is_caught() -> None:
    class Bad(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = nn.Sequential(Bad()), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x)

    found = memory_profile(Tries(), input_data=torch.ones(8))
    assert [(call.path, call.depth) for call in found.calls] == [
        ("", 0),
        ("bad", 1),
        ("bad.0", 2),
        ("good", 1),
    ]
    layers = {layer.path: layer for layer in summary(Tries(), (8,)).layers}
    assert layers["bad.0"].calls == 1 and layers["good"].output_shapes == ((8,),)


class Chain(nn.Sequential):
    """A sequence with its own forward. torch compiles none of its own classes in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("where", ["wrapped", "in place", "a part"])
@pytest.mark.parametrize("look", LOOKS)
def test_compiled_models_are_seen_and_nothing_is_compiled_for_it(look: Look, where: str) -> None:
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = Chain(Chain(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4)), torch.ones(2, 4)
    if where == "wrapped":
        called: Any = torch.compile(model, backend=backend)
    else:
        (model if where == "in place" else model[0]).compile(backend=backend)
        called = model
    with torch.no_grad():
        expected = called(x)
        compiled = len(graphs)
        assert compiled > 0
        found = look(called, x)
        rows = found.layers if hasattr(found, "layers") else found.calls
        assert [row.path for row in rows if getattr(row, "calls", 1)] == ["", "0", "0.0", "0.1", "1"]
        assert torch.equal(called(x), expected)
    assert len(graphs) == compiled
