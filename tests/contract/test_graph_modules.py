"""Installed `torch.fx.GraphModule`s, whose classes hold generated code: recompiled, edited, pickled."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_moved
from torch import nn
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing

budgets = pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale + self.shift


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = traced()
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def traced() -> GraphModule:
    torch.manual_seed(0)
    model = torch.fx.symbolic_trace(Inner())
    for node in model.graph.nodes:
        node.type = None  # postponed annotations are strings, which torch cannot pickle
    model.recompile()
    return model


def lazy() -> GraphModule:
    return _LazyGraphModule.from_graphmodule(traced())


KINDS: dict[str, Callable[[], GraphModule]] = {"traced": traced, "lazy": lazy}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def replace_relu(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.relu:
            node.target = torch.sigmoid
    graph.lint()


def edit(model: GraphModule) -> None:
    replace_relu(model.graph)
    model.recompile()


def assign(model: GraphModule) -> None:
    graph = copy.deepcopy(model.graph)
    replace_relu(graph)
    model.graph = graph


def dump(model: nn.Module) -> bytes:
    return pickle.dumps(model)


def save(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


TOUCHES: dict[str, Callable[[Any], object]] = {
    "recompile": lambda model: model.recompile(),
    "edit": edit,
    "an assigned graph": assign,
    "pickle": dump,
    "torch.save": save,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@budgets
@kinds
@pytest.mark.parametrize("touch", TOUCHES)
def test_it_runs_its_present_code(
    provider: Provider, make: Callable[[], GraphModule], touch: str, budget: str | None
) -> None:
    model, plain = make(), make()
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    x = provider.randn(2, 4)
    for called_before in (False, True):
        for each in (model, plain):
            TOUCHES[touch](each)
        moved = testing.moved(plain, provider.device, torch.float64)
        for call in range(2):
            what = f"output of call {call}, called before: {called_before}"
            testing.assert_bit_equal(model(x), moved(x), what)
        assert dynswap_ext.is_installed(model)
    assert_moved(handle, model)
    dynswap_ext.uninstall(model)
    assert type(model).__mro__[1:] == type(plain).__mro__[1:]
    testing.assert_bit_equal(
        model(x.cpu().float()), plain(x.cpu().float()), "output of the uninstalled model"
    )


@kinds
def test_a_call_is_noticed_as_soon_as_the_code_is_new(
    provider: Provider, make: Callable[[], GraphModule]
) -> None:
    """A call after `recompile` is noticed: reads of weights within it give plain tensors, not parameters."""
    model = make()
    provider.install(model, dtype=torch.float64)
    model(provider.randn(2, 4))
    seen: list[type] = []
    model.linear.register_forward_pre_hook(lambda *_: seen.append(type(model.scale)))  # type: ignore[union-attr]
    model.recompile()
    model(provider.randn(2, 4))
    assert seen == [torch.Tensor]


def test_a_graph_module_inside_another_module(provider: Provider) -> None:
    model, plain = Outer(), Outer()
    plain.load_state_dict(model.state_dict())
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 4)
    for each in (model, plain):
        edit(each.first)
    moved = testing.moved(plain, provider.device, torch.float64)
    testing.assert_bit_equal(model(x), moved(x), "output")
    outer = torch.fx.symbolic_trace(plain)
    loaded = pickle.loads(pickle.dumps(model))
    testing.assert_bit_equal(loaded.double()(x.cpu()), outer.double()(x.cpu()), "output of the pickled model")


def load(dumped: bytes) -> nn.Module:
    return pickle.loads(dumped)  # type: ignore[no-any-return]


def load_saved(saved: bytes) -> nn.Module:
    return torch.load(io.BytesIO(saved), weights_only=False)  # type: ignore[no-any-return]


@kinds
@pytest.mark.parametrize(
    ("pickled", "loaded"), [(dump, load), (save, load_saved)], ids=["pickle", "torch.save"]
)
def test_a_pickle_is_that_of_the_uninstalled_one(
    provider: Provider,
    make: Callable[[], GraphModule],
    pickled: Callable[[nn.Module], bytes],
    loaded: Callable[[bytes], GraphModule],
) -> None:
    model = make()
    plain = loaded(pickled(model))
    provider.install(model, dtype=torch.float64)
    for value in (2.0, 3.0):
        with torch.no_grad():
            model.scale.fill_(value)  # type: ignore[operator]
        found = loaded(pickled(model))
        assert not any(map(dynswap_ext.is_installed, found.modules()))
        for mine, other in zip(found.modules(), plain.modules(), strict=True):
            assert list(vars(mine)) == list(vars(other))
            assert type(mine).__mro__[1:] == type(other).__mro__[1:]
        assert found.code == plain.code
        assert found.scale.tolist() == [value] * 4
        moved = testing.moved(found, provider.device, torch.float64)
        x = provider.randn(2, 4)
        testing.assert_bit_equal(model(x), moved(x), "output")


def test_a_package_has_a_plain_one(provider: Provider) -> None:
    model = traced()
    provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model.scale.fill_(3.0)  # type: ignore[operator]
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("models", "model.pkl", model)
    file.seek(0)
    loaded = torch.package.PackageImporter(file).load_pickle("models", "model.pkl")
    assert [key for key in vars(loaded) if "dynswap" in key] == []
    moved = testing.moved(loaded, provider.device, torch.float64)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x), moved(x), "output")


def test_a_shallow_copy_is_plain_and_shares_the_masters(provider: Provider) -> None:
    model = traced()
    provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model.scale.fill_(3.0)  # type: ignore[operator]
    copied = copy.copy(model)
    assert not dynswap_ext.is_installed(copied) and dynswap_ext.is_installed(model)
    assert copied.scale is model._parameters["scale"] and copied.scale.tolist() == [3.0] * 4
    assert copied.linear is model.linear


def test_training_after_an_edit(provider: Provider) -> None:
    model, plain = traced(), traced()
    provider.install(model, dtype=torch.float64)
    for each in (model, plain):
        edit(each)
    moved = testing.moved(plain, provider.device, torch.float64)
    for each in (model, moved):
        each(provider.randn(2, 4)).square().sum().backward()
    for (name, mine), other in zip(model.named_parameters(), moved.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None, name
        testing.assert_bit_equal(mine.grad, other.grad.to(mine.device, mine.dtype), f"gradient of {name}")


def test_a_patched_call_of_the_class_is_called(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Inner()
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 4)
    expected = model(x)
    called: list[nn.Module] = []
    plain_call = nn.Module.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return plain_call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", call)
    testing.assert_bit_equal(model(x), expected, "output")
    assert called == [model, model.linear]
