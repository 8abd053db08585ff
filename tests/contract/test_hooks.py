"""Hooks of every kind on installed modules: the same calls, with the same values, as on plain ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_moved, assert_same_training_step
from torch import nn
from torch.nn.modules import module as module_globals

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

Seen = list[Any]


@pytest.fixture(autouse=True)
def _no_global_hook_is_left() -> Iterator[None]:
    yield
    assert not module_globals._has_any_global_hook()


def pair_with(
    provider: Provider,
    *,
    before: bool,
    hook: Callable[[nn.Module, Seen], None],
    make: Callable[[], nn.Module] = lambda: mlp(layers=2),
) -> Any:
    """Return a model, hooked before or after its install, a moved copy, what hooks saw, and the handle."""
    model = make()
    moved = testing.moved(model, provider.device, torch.float64)
    seen: list[Seen] = [[], []]
    if before:
        hook(model, seen[0])
    handle = provider.install(model, dtype=torch.float64)
    if not before:
        hook(model, seen[0])
    hook(moved, seen[1])
    return model, moved, seen, handle


def values(*tensors: Any) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().clone() for t in tensors]


when = pytest.mark.parametrize("before", [True, False], ids=["before the install", "while installed"])


@when
def test_forward_hooks(provider: Provider, before: bool) -> None:
    def hook(model: nn.Module, seen: Seen) -> None:
        layer = model[2]

        def pre(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            assert module is layer
            assert module.weight.dtype == torch.float64  # a hook, too, is handed the weight out
            seen.append(values(args[0], module.weight))
            return (args[0] * 2,)

        def post(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            assert module is layer
            seen.append(values(args[0], output))
            return output + module.bias

        layer.register_forward_pre_hook(pre)
        layer.register_forward_hook(post)

    model, moved, seen, handle = pair_with(provider, before=before, hook=hook)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert len(seen[0]) == 2
    testing.assert_bit_equal(seen[0], seen[1], "what the hooks saw")
    assert_moved(handle, model)


@when
def test_hooks_with_keyword_arguments_and_in_front(provider: Provider, before: bool) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
            return super().forward(x) * by

    def hook(m: nn.Module, found: Seen) -> None:
        def pre(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            found.append(("pre", sorted(kwargs)))
            return args, {"by": kwargs["by"] * 2}

        def post(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> None:
            found.append(("post", kwargs["by"]))

        m.register_forward_pre_hook(lambda *_: found.append("plain"))
        m.register_forward_pre_hook(pre, with_kwargs=True, prepend=True)
        m.register_forward_hook(post, with_kwargs=True)

    model, moved, seen, handle = pair_with(provider, before=before, hook=hook, make=lambda: Scaled(8, 8))
    x = provider.randn(3, 8)
    testing.assert_bit_equal(model(x, by=3.0), moved(x, by=3.0), "output")
    assert seen[0] == seen[1] == [("pre", ["by"]), "plain", ("post", 6.0)]
    assert_moved(handle, model)


@when
def test_a_hook_that_is_always_called(provider: Provider, before: bool) -> None:
    def hook(model: nn.Module, seen: Seen) -> None:
        model[2].register_forward_hook(lambda *_: seen.append("always"), always_call=True)
        model[2].register_forward_hook(lambda *_: seen.append("after success"))

    model, moved, seen, _ = pair_with(provider, before=before, hook=hook)
    for m in (model, moved):
        with pytest.raises(RuntimeError):
            m[2](provider.randn(3, 5))
        m(provider.randn(3, 16))
    assert seen[0] == seen[1] == ["always", "always", "after success"]


@when
def test_full_backward_hooks(provider: Provider, before: bool) -> None:
    def hook(model: nn.Module, seen: Seen) -> None:
        def pre(module: nn.Module, grad_output: Any) -> Any:
            assert module is model[2]
            seen.append(values(*grad_output))
            return tuple(g * 2 for g in grad_output)

        def post(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            assert module is model[2]
            seen.append(values(*grad_input, *grad_output))
            return tuple(g * 3 for g in grad_input)

        model[2].register_full_backward_pre_hook(pre)
        model[2].register_full_backward_hook(post)

    model, moved, seen, handle = pair_with(provider, before=before, hook=hook)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert len(seen[0]) == 2
    testing.assert_bit_equal(seen[0], seen[1], "gradients that the hooks saw")
    assert_moved(handle, model)


def test_a_hook_on_the_whole_model_sees_the_installed_model(provider: Provider) -> None:
    model = mlp(layers=2)
    provider.pair(model)
    seen: Seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module))
    model.register_full_backward_hook(lambda module, *_: seen.append(module))
    model(provider.randn(3, 16).requires_grad_()).sum().backward()
    assert [m is model for m in seen] == [True, True]
    assert dynswap_ext.is_installed(seen[0])


def test_removable_handles(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    registered = [m[0].register_forward_hook(lambda *args: args[2] * 2) for m in (model, moved)]
    testing.assert_bit_equal(model(x), moved(x), "output with the hook")
    with_hook = model(x).detach()
    for handle in registered:
        handle.remove()
    testing.assert_bit_equal(model(x), moved(x), "output without the hook")
    assert not torch.equal(model(x), with_hook)
    with model[0].register_forward_hook(lambda *args: args[2] * 2):
        testing.assert_bit_equal(model(x).detach(), with_hook, "output with the hook again")
    assert not model[0]._forward_hooks


def test_hooks_outlive_the_uninstall(provider: Provider) -> None:
    model = mlp(layers=1)
    handle = provider.install(model, dtype=torch.float64)
    seen: Seen = []
    registered = model[0].register_forward_hook(lambda module, *_: seen.append(module.weight))
    handle.uninstall()
    model(torch.randn(2, 16))
    assert seen[0] is model[0]._parameters["weight"]
    registered.remove()


def test_global_hooks(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    seen: Seen = []

    def note(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *args: Any) -> None:
            seen.append((kind, type(module).__name__))

        return hook

    registered = [
        module_globals.register_module_forward_pre_hook(note("pre")),
        module_globals.register_module_forward_hook(note("post")),
        module_globals.register_module_full_backward_pre_hook(note("backward pre")),
        module_globals.register_module_full_backward_hook(note("backward")),
    ]
    try:
        found = []
        for m in (model, moved):
            seen.clear()
            m(x).square().sum().backward()
            found.append(list(seen))
    finally:
        for r in registered:
            r.remove()
    assert found[0] == found[1]
    assert len(found[0]) >= 15
    assert_gradients_as_moved(model, moved)
    assert_moved(handle, model)


def test_global_registration_hooks_see_masters(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    seen: Seen = []
    with module_globals.register_module_parameter_registration_hook(lambda *args: seen.append(args)):
        new = nn.Parameter(torch.ones(16))
        model[0].bias = new
    assert [(m is model[0], name, p is new) for m, name, p in seen] == [(True, "bias", True)]


def test_a_hook_that_keeps_nothing_lets_the_weight_go(provider: Provider) -> None:
    model = mlp(layers=2)
    _, handle = provider.pair(model)
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: output.clone())
    with torch.no_grad():
        model(provider.randn(3, 16))
    gc.collect()
    testing.assert_nothing_held(handle)
