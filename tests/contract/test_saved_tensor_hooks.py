"""Saved-tensor hooks of other code get masters, as in a plain model, and keep no memory on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_gradients_as_moved, assert_moved, total
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_saved_tensor_hooks import Halves, Hooks, Offloading
from sample_subclasses import ScaledInt8

FEATURES, LAYERS = 64, 6
#: Device bytes of one layer in float64.
LAYER = (2 * FEATURES * FEATURES + 4 * FEATURES) * 8
#: With the first budget, weights are streamed; without one, all stay on the device.
BUDGETS = pytest.mark.parametrize("budget", [3 * LAYER, None], ids=["streamed", "resident"])


class Layer(nn.Module):
    """A frozen base, whose weight autograd saves as a view, and a trained scale, which it saves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.mix = nn.Linear(FEATURES, FEATURES, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.base(self.norm(x)))) * self.scale


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def step(model: nn.Module, x: torch.Tensor, hooks: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
    """Run a step and return the gradient of the input. Those of the masters stay on them."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with hooks:
        y = model(x)
    total(y).backward()
    assert x.grad is not None
    return x.grad


def check(model: nn.Module, moved: nn.Module, x: torch.Tensor, make: Callable[[nn.Module], Any]) -> None:
    for _ in range(2):
        grads = [step(m, x, make(m)) for m in (model, moved)]
        testing.assert_bit_equal(*grads, "gradient of the input")
        assert_gradients_as_moved(model, moved)


def shows(tensor: torch.Tensor, master: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == master.untyped_storage().data_ptr()


@BUDGETS
@pytest.mark.parametrize("rows", [(5,), (2, 5)], ids=["", "in batches"])
@pytest.mark.parametrize("library", ["trl", "torchtune"])
def test_as_much_is_offloaded_as_of_a_plain_model(
    provider: Provider, library: str, rows: tuple[int, ...], budget: int | None
) -> None:
    model = layers()
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(*rows, FEATURES)
    copied = []
    for m in (model, moved):
        for _ in range(2):
            hooks = Offloading(m, library)
            step(m, x, hooks.active())
            assert not hooks.tracker
        copied.append(hooks.copied)
    assert copied[0] == copied[1] > 0
    check(model, moved, x, lambda m: Offloading(m, library).active())
    assert handle.stats().overflow_bytes == 0
    assert_moved(handle, model)


@BUDGETS
def test_the_hooks_get_the_masters(provider: Provider, budget: int | None) -> None:
    model = layers().requires_grad_(False)
    _, handle = provider.pair(model, budget=budget)
    x = provider.randn(2, 5, FEATURES).requires_grad_()
    y = model(x)
    without_hooks = handle.stats().live_leases
    hooks = Hooks()
    with hooks.active():
        y = model(x)
    masters = dict(model.named_parameters())
    for n in range(LAYERS):
        for name in ("norm.weight", "scale"):
            assert any(given is masters[f"{n}.{name}"] for given in hooks.given)
    views = [t for t in hooks.given if any(shows(t, masters[f"{n}.base.weight"]) for n in range(LAYERS))]
    assert len(views) == LAYERS
    assert all(view.shape == (FEATURES, FEATURES) for view in views)
    assert handle.stats().live_leases == without_hooks  # though the hooks and the graph are alive
    total(y).backward()


def test_a_graph_of_the_hooks_stays_within_the_budget(provider: Provider) -> None:
    model = layers()
    moved, handle = provider.pair(model, budget=3 * LAYER, strict_budget=True)
    check(model, moved, provider.randn(2, 5, FEATURES), lambda _: Hooks().active())
    assert handle.stats().peak_bytes <= 3 * LAYER


@BUDGETS
@pytest.mark.parametrize("pin", [False, True], ids=["", "pinned"])
def test_save_on_cpu(provider: Provider, pin: bool, budget: int | None) -> None:
    model = layers()
    moved, handle = provider.pair(model, budget=budget)
    device = provider.device.type if provider.device.type != "cpu" else "cuda"
    check(
        model,
        moved,
        provider.randn(2, 5, FEATURES),
        lambda _: save_on_cpu(pin_memory=pin, device_type=device),
    )
    assert handle.stats().overflow_bytes == 0


@BUDGETS
def test_what_the_hooks_make_of_a_weight_is_used(provider: Provider, budget: int | None) -> None:
    model = layers()
    moved, _ = provider.pair(model, budget=budget)
    x = provider.randn(2, 5, FEATURES)
    check(model, moved, x, lambda _: Halves().active())
    rounded = step(model, x, Halves().active())
    assert not rounded.equal(step(model, x, contextlib.nullcontext()))


class NoOp(nn.Module):
    """Pushes and pops hooks that keep every tensor around some modules, as trl does for a model's head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        for layer in self.layers:
            hooks = Hooks().active()
            layer.base.register_forward_pre_hook(lambda *_, hooks=hooks: hooks.__enter__())
            layer.base.register_forward_hook(lambda *_, hooks=hooks: hooks.__exit__(), always_call=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class AroundAnOperation(nn.Module):
    """Pushes hooks around an operation of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with Hooks().active():
                x = torch.tanh(F.linear(x, layer.base.weight, layer.base.bias)) * layer.scale
        return x


class AroundAModule(AroundAnOperation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with save_on_cpu():
                x = layer(x)
        return x


class CheckpointedOperation(AroundAnOperation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:

            def run(x: torch.Tensor, layer: Layer = layer) -> torch.Tensor:
                return torch.tanh(F.linear(x, layer.base.weight, layer.base.bias)) * layer.scale

            x = checkpoint(run, x, use_reentrant=False)
        return x


INSIDE = [NoOp, AroundAnOperation, AroundAModule, CheckpointedOperation]


@pytest.mark.parametrize("around", [False, True], ids=["", "hooks around"])
@pytest.mark.parametrize("make", INSIDE, ids=lambda cls: cls.__name__)
def test_hooks_that_are_pushed_in_a_forward(
    provider: Provider, make: Callable[[], nn.Module], around: bool
) -> None:
    model = make()
    moved, handle = provider.pair(model, budget=3 * LAYER, strict_budget=True)
    check(
        model,
        moved,
        provider.randn(2, 5, FEATURES),
        lambda _: Hooks().active() if around else contextlib.nullcontext(),
    )
    assert handle.stats().peak_bytes <= 3 * LAYER
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_the_callers_hooks_are_as_they_were_after_a_call(provider: Provider) -> None:
    model = layers()
    provider.pair(model)
    hooks = Hooks()
    with hooks.active():
        y = model(provider.randn(5, FEATURES))
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)
    total(y).backward()
    assert (pack, unpack) == (hooks.pack, hooks.unpack)


@pytest.mark.parametrize("inner", [True, False], ids=["inside", "around"])
def test_checkpointing_and_hooks(provider: Provider, inner: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                with save_on_cpu() if inner else contextlib.nullcontext():
                    x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed()
    moved, handle = provider.pair(model, budget=3 * LAYER, strict_budget=True)
    check(
        model,
        moved,
        provider.randn(2, 5, FEATURES),
        lambda m: contextlib.nullcontext() if inner else Offloading(m, "trl").active(),
    )
    assert handle.stats().peak_bytes <= 3 * LAYER


def test_a_whole_model_under_hooks(provider: Provider) -> None:
    """Hooks work around attention, which does not call its projection, and around a norm's statistics."""
    attention = nn.TransformerEncoderLayer(16, 2, 24, dropout=0, batch_first=True)
    model = nn.Sequential(attention, nn.Flatten(0, 1), nn.BatchNorm1d(16))
    moved, handle = provider.pair(model, budget=None)
    x = provider.randn(2, 5, 16)
    for make in (Hooks, Halves):
        check(model, moved, x, lambda _, make=make: make().active())
    assert_moved(handle, model)


def test_weights_with_gaps(provider: Provider) -> None:
    model = layers()
    for layer in model:
        wide = torch.randn(FEATURES, 2 * FEATURES)
        layer.mix.weight = nn.Parameter(wide[:, ::2])
    moved, _ = provider.pair(model, budget=4 * LAYER)
    x = provider.randn(2, 5, FEATURES)
    for make in (Hooks, Halves):
        check(model, moved, x, lambda _, make=make: make().active())


def test_slices_of_one_tensor(provider: Provider) -> None:
    model = layers()
    storage = torch.randn(LAYERS + 1, FEATURES, FEATURES)
    for slice_, layer in zip(storage[1:], model, strict=True):
        layer.mix.weight = nn.Parameter(slice_)
    moved, _ = provider.pair(model, budget=4 * LAYER)
    x = provider.randn(2, 5, FEATURES)
    for make in (Hooks, Halves):
        check(model, moved, x, lambda _, make=make: make().active())
    hooks = Hooks()
    with hooks.active():
        y = model(x)
    total(y).backward()
    assert sum(shows(given, storage) for given in hooks.given) == LAYERS


def test_masters_of_a_file(provider: Provider, tmp_path: Path) -> None:
    model = testing.map_from_file(layers(), tmp_path / "model.pt")
    moved, handle = provider.pair(model, budget=3 * LAYER, strict_budget=True)
    x = provider.randn(2, 5, FEATURES)
    for make in (lambda m: Offloading(m, "trl"), lambda _: Halves()):
        check(model, moved, x, lambda m, make=make: make(m).active())
    assert_moved(handle, model)


def test_masters_that_are_inference_tensors(provider: Provider) -> None:
    moved = testing.moved(layers(), provider.device, torch.float64).requires_grad_(False)
    with torch.inference_mode():
        model = layers().requires_grad_(False)
    provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 5, FEATURES)
    for make in (Hooks, Halves):
        testing.assert_bit_equal(step(model, x, make().active()), step(moved, x, make().active()))


def test_wrappers_of_quantised_weights(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("pure Python moves a subclass as a whole, by its own .to()")
    model = layers()
    for layer in model:
        layer.base.weight = nn.Parameter(ScaledInt8.quantise(layer.base.weight), requires_grad=False)
    moved = testing.moved(model, provider.device)
    handle = provider.install(model, budget="minimum")
    x = provider.randn(2, 5, FEATURES, dtype=torch.float32)
    hooks = Hooks()
    step(model, x, hooks.active())
    if provider.device.type != "cpu":  # on the CPU, the handed-out wrapper has the master's inner tensors
        masters = [layer.get_parameter("base.weight") for layer in model]
        assert sum(any(given is master for master in masters) for given in hooks.given) == LAYERS
    check(model, moved, x, lambda _: Hooks().active())
    assert handle.stats().overflow_bytes == 0


def test_second_derivatives(provider: Provider) -> None:
    model = layers()
    moved, _ = provider.pair(model)
    results = []
    for m in (model, moved):
        x = provider.randn(2, 5, FEATURES).requires_grad_()
        with Hooks().active():
            (first,) = torch.autograd.grad(total(m(x)), x, create_graph=True)
            total(first).backward()
        results.append(x.grad)
    testing.assert_bit_equal(*results)
    assert_gradients_as_moved(model, moved)


def test_a_backward_after_the_uninstall(provider: Provider) -> None:
    model = layers()
    moved, handle = provider.pair(model, budget=3 * LAYER)
    x = [provider.randn(2, 5, FEATURES).requires_grad_() for _ in range(2)]
    for hooks in (Hooks(), Halves()):
        losses = []
        for m, given in zip((model, moved), x, strict=True):
            with hooks.active():
                losses.append(total(m(given)))
        dynswap_ext.uninstall(model)
        for loss in losses:
            loss.backward()
        testing.assert_bit_equal(x[0].grad, x[1].grad)
        handle = provider.install(model, dtype=torch.float64, budget=3 * LAYER)
    assert handle.active


def test_a_master_that_is_written_before_backward(provider: Provider) -> None:
    model = layers()
    provider.pair(model)
    with save_on_cpu():
        y = model(provider.randn(2, 5, FEATURES))
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if n.endswith("mix.weight")).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total(y).backward()


@contextlib.contextmanager
def hooks_that(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Iterator[None]:
    with saved_tensors_hooks(pack, unpack):
        yield


def fails(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, nn.Parameter):
        raise ValueError("not this one")
    return tensor.detach()


def test_hooks_that_fail(provider: Provider) -> None:
    model = layers()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 5, FEATURES)

    def kept(tensor: Any) -> Any:
        # Not the tensor itself: an operation's output would keep its graph alive.
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach()

    for m in (model, moved):
        with pytest.raises(ValueError, match="not this one"), hooks_that(fails, kept):
            m(x)
        with hooks_that(kept, fails):
            y = m(x)
        with pytest.raises(ValueError, match="not this one"):
            total(y).backward()
        with hooks_that(kept, lambda _: None):
            y = m(x)
        with pytest.raises(TypeError, match="unpack_hook expected to be a Tensor"):
            total(y).backward()
        with (
            pytest.raises(RuntimeError, match="pack hook is modifying its input in place"),
            hooks_that(lambda t: t.mul_(1) if isinstance(t, nn.Parameter) else t.detach(), kept),
        ):
            m(x)
    del y
    check(model, moved, x, lambda _: Hooks().active())
    testing.assert_nothing_held(handle)
