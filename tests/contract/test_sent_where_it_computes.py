"""`.to(device)` of an installed model that computes on that device already: its masters stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same_training_step, state_copy
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.compat import DynamicSwapInstaller
from sample_models import ConvNet, mlp

HOME = torch.device("cpu")


def to(provider: Provider) -> dict[str, Callable[[nn.Module], Any]]:
    device = provider.device
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "device": lambda m: m.to(device),
        "text": lambda m: m.to(str(device)),
        "no index": lambda m: m.to(device.type),
        "keyword": lambda m: m.to(device=device, non_blocking=True),
        "tensor": lambda m: m.to(torch.empty(0, device=device)),
        "method": lambda m: getattr(m, device.type)(),
    }
    if device.type == "cpu":  # accelerate sends models to "cpu:0", which torch takes for another device
        ways["CPU 0"] = lambda m: m.to(torch.device("cpu", 0))
        ways["text of CPU 0"] = lambda m: m.to("cpu:0")
        ways["keyword of CPU 1"] = lambda m: m.to(device="cpu:1", non_blocking=True)
    else:
        ways["method of an index"] = lambda m: getattr(m, device.type)(device.index)
        ways["index"] = lambda m: m.to(device.index)
    return ways


WAYS = ["device", "text", "no index", "keyword", "tensor", "method", "method of an index", "index"]
CPU_WAYS = ["CPU 0", "text of CPU 0", "keyword of CPU 1"]


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, dynswap_ext.DynswapWarning)]


def addresses_of(model: nn.Module) -> list[int]:
    """Return where masters and their gradients are in memory."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *grads)]


def times(provider: Provider) -> int:
    """Return how many notices are expected: one, but none on the CPU, where the masters are."""
    return 0 if provider.device.type == "cpu" else 1


@pytest.mark.parametrize("way", WAYS + CPU_WAYS)
def test_masters_stay(provider: Provider, way: str) -> None:
    if way not in to(provider):
        pytest.skip("for other devices")
    model = mlp()
    moved, handle = provider.pair(model)
    masters = list(model.parameters())
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    for p in masters:
        assert p.grad is not None
    addresses = addresses_of(model)
    handle.reset_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert to(provider)[way](model) is model
    assert len(told(caught)) == times(provider)
    assert all(
        f"Sequential is installed and computes on {provider.device} already" in t for t in told(caught)
    )
    assert all("uninstall(model)" in t for t in told(caught))
    assert handle.stats().bytes_moved == 0
    assert [a is b for a, b in zip(model.parameters(), masters, strict=True)] == [True] * 6
    assert addresses_of(model) == addresses
    assert {(p.device, p.grad.device, p.dtype) for p in masters if p.grad is not None} == {
        (HOME, HOME, torch.float32)
    }
    assert_same_training_step(model, moved, lambda m: m(x))


def test_the_notice_is_shown_for_each_install_and_points_at_the_caller(provider: Provider) -> None:
    if provider.device.type == "cpu":
        pytest.skip("nothing to notice")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            model = mlp()
            provider.install(model)
            model.to(provider.device)
    assert len(told(caught)) == 2
    assert {w.filename for w in caught} == {__file__}


class PassesOn(nn.Sequential):
    """Overrides `to` and calls the base's, as a library's class may."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return super().to(*args, **kwargs)


def test_the_notice_points_past_a_class_that_passes_it_on(provider: Provider) -> None:
    if provider.device.type == "cpu":
        pytest.skip("nothing to notice")
    model = PassesOn(nn.Linear(16, 16))
    provider.install(model)

    def asks() -> None:
        model.to(provider.device)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asks()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, asks.__code__.co_firstlineno + 1)]


def test_a_notice_that_is_an_error_changes_nothing(provider: Provider) -> None:
    if provider.device.type == "cpu":
        pytest.skip("nothing to notice")
    model = mlp()
    moved, _ = provider.pair(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dynswap_ext.DynswapWarning):
            model.to(provider.device, torch.float16)
    assert {(p.device, p.dtype) for p in model.parameters()} == {(HOME, torch.float32)}
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))


def test_mapped_masters_stay_mapped(provider: Provider, tmp_path: Path) -> None:
    model = testing.map_from_file(mlp(), tmp_path / "masters.pt")
    moved, handle = provider.pair(model, None)
    addresses = addresses_of(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in CPU_WAYS if provider.device.type == "cpu" else ["device"]:
            to(provider)[name](model)
    assert len(told(caught)) == times(provider)
    assert addresses_of(model) == addresses
    assert_same_output(model, moved, provider.randn(3, 16, dtype=torch.float32))
    if provider.native:  # pure Python hands mapped memory out as it is on the CPU
        assert handle.stats().bytes_moved > 0
        assert {row.source for row in handle.report().rows} == {"file"}


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
@pytest.mark.parametrize("index", [False, True], ids=["the device", "the CPU's index"])
def test_a_cast_in_the_same_call_is_done(provider: Provider, index: bool) -> None:
    if index and provider.device.type != "cpu":
        pytest.skip("for other devices")
    model = ConvNet().eval()
    _, handle = provider.pair(model)
    device = torch.device("cpu", 0) if index else provider.device
    model.to(device, torch.float16, memory_format=torch.channels_last)
    assert {p.device for p in model.parameters()} == {HOME}
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.conv.get_parameter("weight").is_contiguous(memory_format=torch.channels_last)
    moved = testing.moved(model, provider.device, torch.float64)
    handle.reset_stats()
    x = provider.randn(2, 3, 8, 8)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")
    assert handle.stats().bytes_moved > 0


def test_elsewhere_they_move(provider: Provider) -> None:
    model = mlp()
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    elsewhere = [HOME]
    if provider.device.type != "cpu" and provider.device_module.device_count() > 1:
        other = torch.device(provider.device.type, 1)
        elsewhere += [other, HOME]
        model.to(other)
        assert {p.device for p in model.parameters()} == {other}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.to(provider.device)  # also from there
        assert {p.device for p in model.parameters()} == {other}
        with torch.no_grad():
            testing.assert_bit_equal(model(x), moved(x), "output")
    for device in elsewhere:
        model.to(device)
        assert {p.device for p in model.parameters()} == {device}
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")


def test_on_purpose(provider: Provider) -> None:
    """Masters can be moved after an uninstall, of a part too, or by `_apply` with another function."""
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    dynswap_ext.uninstall(model[0]).to(provider.device, torch.float64)
    assert model[0].weight.device == provider.device
    model[2]._apply(lambda t: t.to(provider.device))
    assert model[2].get_parameter("weight").device == provider.device
    assert_same_output(model, moved, x)
    handle.uninstall()
    model.to(provider.device, torch.float64)
    assert {p.device for p in model.parameters()} == {provider.device}
    assert_same_output(model, moved, x)


def assert_same_output(model: nn.Module, moved: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x), "output")


class WithPlainTensor(nn.Module):
    """Moves a plain tensor in its own `_apply`, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale = nn.Parameter(torch.randn(16))
        self.table = torch.randn(16)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.table = fn(self.table)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.table


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_what_is_not_a_master_moves(provider: Provider) -> None:
    """Plain tensors of a class that moves them, and modules that are not installed, are moved."""
    model = WithPlainTensor().to(torch.float64)
    wrapper = Wrapper(model).to(torch.float64)
    moved = testing.moved(wrapper, provider.device)
    state = state_copy(model)
    provider.install(model)
    addresses = addresses_of(model)
    wrapper.to(provider.device)
    if provider.device.type == "cpu":
        plain = [model.table.data_ptr(), wrapper.head.weight.data_ptr()]
        wrapper.to("cpu:0")
        assert model.table.data_ptr() != plain[0] and wrapper.head.weight.data_ptr() != plain[1]
    assert addresses_of(model) == addresses
    assert model.table.device == wrapper.head.weight.device == provider.device
    assert {p.device for p in model.parameters()} == {HOME}
    assert_same_training_step(wrapper, moved, lambda m: m(provider.randn(3, 16)))
    testing.assert_bit_equal(state_copy(model), state)


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_parts_of_several_installs(provider: Provider) -> None:
    model = nn.Sequential(mlp(), nn.Linear(16, 16))
    provider.install(model[0])
    other = torch.device("cpu")
    handle = dynswap_ext.install(model[1], device=other, provider=provider.backend)
    model.to(provider.device)
    assert {p.device for p in model[0].parameters()} == {HOME}
    assert {p.device for p in model[1].parameters()} == {provider.device}
    handle.uninstall()


def test_the_drop_in_class_moves_a_leaf(provider: Provider) -> None:
    model = mlp()
    handle = DynamicSwapInstaller.install_model(model, device=provider.device, provider=provider.backend)
    provider.handles.append(handle)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model[0].to(provider.device)
    assert model[0].get_parameter("weight").device == provider.device
    assert told(caught) == []
