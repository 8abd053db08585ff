"""Modes of torch that a caller sets around an installed model's call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from oracle import assert_gradients_as_moved, assert_moved, assert_same_training_step, total
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from conftest import Provider
from dynswap_ext import testing
from sample_models import TinyTransformer, mlp

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class PassesThrough(TorchDispatchMode):
    """A dispatch mode of the caller, which changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Mode] = {
    "default device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "save on cpu": save_on_cpu,
    "no saved-tensor hooks": lambda: disable_saved_tensors_hooks("not here"),
    "dispatch mode": PassesThrough,
    "no multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around", ["forward", "forward and backward", "install"])
def test_outputs_and_gradients(provider: Provider, mode: str, around: str) -> None:
    model = mlp(layers=2)
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(3, 16)
    if around == "install":
        with MODES[mode]():
            handle = provider.install(model, dtype=torch.float64)
        assert_same_training_step(model, moved, lambda m: m(x))
    else:
        handle = provider.install(model, dtype=torch.float64)
        losses = []
        for m in (model, moved):
            with MODES[mode]():
                y = m(x)
                losses.append((y, y.square().sum()))
                if around == "forward and backward":
                    losses[-1][1].backward()
            if around == "forward":
                losses[-1][1].backward()
        testing.assert_bit_equal(losses[0], losses[1], "output")
        assert_gradients_as_moved(model, moved)
    assert_moved(handle, model)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_a_dispatch_mode_sees_no_copies_of_weights(provider: Provider, budget: str | None) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    model = mlp(layers=4)
    moved, handle = provider.pair(model, torch.float64, budget=budget)
    x = provider.randn(3, 16)
    seen = {}
    with torch.no_grad():
        for m in (model, moved):
            m(x)
            with Seen() as mode:
                m(x)
            seen[m] = mode.names
    # Pure Python makes its tensors with torch's own functions.
    assert [name for name in seen[model] if name != "aten.detach.default"] == seen[moved]
    assert_moved(handle, model)


@pytest.mark.parametrize("training", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("cache", [True, False], ids=["cached casts", "uncached"])
def test_autocast(provider: Provider, training: bool, cache: bool) -> None:
    # Masters in half precision, as on the CPU the same dtype would be handed out itself.
    model = TinyTransformer().half()
    moved, handle = provider.pair(model, torch.float32)
    tokens = torch.arange(12).reshape(2, 6).to(provider.device)
    for _ in range(2):
        outputs = []
        for m in (model, moved):
            m.zero_grad()
            with (
                torch.set_grad_enabled(training),
                torch.autocast(provider.device.type, torch.bfloat16, cache_enabled=cache),
            ):
                outputs.append(m(tokens))
        assert outputs[0].dtype == torch.bfloat16
        testing.assert_bit_equal(outputs[0], outputs[1], "output")
        if training:
            for y in outputs:
                total(y.float()).backward()
            for name, p in moved.named_parameters():
                grad = dict(model.named_parameters())[name].grad
                assert grad.dtype == torch.float16
                torch.testing.assert_close(
                    grad, p.grad.half().to(grad.device), rtol=1e-2, atol=1e-2, msg=name
                )
    assert_moved(handle, model)


def test_gradients_under_autocast_to_the_bit(provider: Provider) -> None:
    model = mlp(layers=2).half()
    moved, handle = provider.pair(model, torch.float32)
    x = provider.randn(3, 16, dtype=torch.float32)

    def run(m: nn.Module) -> torch.Tensor:
        with torch.autocast(provider.device.type, torch.bfloat16):
            return m(x)

    assert_same_training_step(model, moved, run)
    assert_moved(handle, model)


@pytest.mark.parametrize("budget", ["1GiB", "minimum"])
def test_a_weight_that_is_used_twice_under_autocast(provider: Provider, budget: str) -> None:
    """Each use casts the weight again, as in plain torch without autocast's cache."""
    model = mlp(layers=2).half()
    moved, handle = provider.pair(model, torch.float32, budget=budget)
    x = provider.randn(64, 16, dtype=torch.float32)

    def run(m: nn.Module) -> torch.Tensor:
        with torch.autocast(provider.device.type, torch.bfloat16, cache_enabled=m is model):
            return m(m(x))

    assert_same_training_step(model, moved, run)
    assert_moved(handle, model)


def test_inference_mode_and_training_in_turn(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model, budget="1GiB")
    x = provider.randn(3, 16)
    for _ in range(2):
        with torch.inference_mode():
            y, expected = model(x), moved(x)
            assert y.is_inference()
            testing.assert_bit_equal(y, expected, "output in inference mode")
            with torch.inference_mode(False):
                inner = [m(x) for m in (model, moved)]
        testing.assert_bit_equal(inner[0], inner[1], "output in the mode left for a while")
        for m, z in zip((model, moved), inner, strict=True):
            m.zero_grad()
            z.square().sum().backward()
        assert_gradients_as_moved(model, moved)
        assert_same_training_step(model, moved, lambda m: m(x))
    assert_moved(handle, model)


def test_installed_in_inference_mode(provider: Provider) -> None:
    model = mlp(layers=2)
    moved = testing.moved(model, provider.device, torch.float64)
    with torch.inference_mode():
        handle = provider.install(model, dtype=torch.float64, budget="1GiB")
        testing.assert_bit_equal(model(provider.randn(3, 16)), moved(provider.randn(3, 16)), "output")
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert_moved(handle, model)


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
def test_masters_made_in_inference_mode_are_written(provider: Provider, budget: str | None) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("small", torch.zeros(3))
            self.register_buffer("large", torch.zeros(400_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.small += 1
            self.large.add_(1)
            return x + self.small.sum() + self.large.sum()

    with torch.inference_mode():
        model = Counts()
        moved, _ = provider.pair(model, budget=budget)
        x = provider.randn(3)
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x), "output")
    for buffer in model.state_dict().values():
        assert buffer.unique().tolist() == [3.0]


def test_grad_mode_changed_in_the_forward(provider: Provider) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.frozen(x)
            with torch.set_grad_enabled(True):
                return self.trained(x)

    model = Half()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert model.frozen.get_parameter("weight").grad is None
    with torch.no_grad():
        assert_same_training_step(model, moved, lambda m: _with_grad(m, x))
    assert_moved(handle, model)


def _with_grad(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return model(x)


def test_anomaly_mode_finds_a_nan(provider: Provider) -> None:
    class Root(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * 0).sqrt() * 0

    model = Root(16, 16)
    _, handle = provider.pair(model)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        model(provider.randn(3, 16)).sum().backward()
    testing.assert_nothing_held(handle)


def test_operations_are_counted_as_in_the_moved_model(provider: Provider) -> None:
    model = mlp(layers=2)
    moved, _ = provider.pair(model)
    counts = []
    for m in (model, moved):
        with FlopCounterMode(display=False) as counter:
            m(provider.randn(3, 16)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_shapes_are_inferred_without_the_meta_device(provider: Provider) -> None:
    model = mlp().eval()
    moved, _ = provider.pair(model)
    x = provider.randn(2, 16)
    expected = moved(x)
    if provider.device.type == "cpu":
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = model(torch.empty(2, 16, dtype=torch.float64))
        assert (fake.shape, fake.dtype, fake.device) == (expected.shape, expected.dtype, expected.device)
    on_meta = copy.deepcopy(model).to("meta")(torch.empty(2, 16, device="meta"))
    assert on_meta.is_meta and on_meta.shape == expected.shape
    testing.assert_bit_equal(model(x), expected)


def test_a_write_that_ends_among_fake_tensors_reaches_the_master(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    moved, _ = provider.pair(model)
    for m in (moved, model):
        with torch.no_grad():
            w = m[0].weight
            torch._foreach_mul_([w], 2.0)
            with FakeTensorMode(allow_non_fake_inputs=True):
                del w
    testing.assert_bit_equal(model(provider.randn(2, 4)), moved(provider.randn(2, 4)))
    testing.assert_bit_equal(model.get_parameter("0.weight"), moved[0].weight.to("cpu", torch.float32))


def test_a_read_outside_a_forward_requires_gradients_as_the_parameter_does(provider: Provider) -> None:
    model = mlp()
    provider.pair(model)
    with torch.no_grad():
        assert model[0].weight.requires_grad and not model[0].weight.to(torch.float32).requires_grad
    model.requires_grad_(False)
    assert not model[0].weight.requires_grad
