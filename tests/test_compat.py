"""`DynamicSwapInstaller`: the calls of FramePack and Forge, and their use of an installed model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.compat import DynamicSwapInstaller
from sample_models import TinyTransformer, mlp, trace


def install(provider: Provider, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
    options = {"device": provider.device, "provider": provider.backend, **options}
    handle = DynamicSwapInstaller.install_model(model, **options)
    provider.handles.append(handle)
    return handle


class WithTable(nn.Module):
    """A model with a table that is its own parameter, like a block of Wan or HunyuanVideo."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(2, 16))
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale = self.scale_shift_table.chunk(2)
        return self.body(x) * scale + shift


# The call sites in FramePack's diffusers_helper/memory.py, with `to` for its device.


def fake_current_device(model: nn.Module, to: dict[str, Any]) -> None:
    if hasattr(model, "scale_shift_table"):
        model.scale_shift_table.data = model.scale_shift_table.data.to(**to)
        return
    for _, module in model.named_modules():
        if hasattr(module, "weight"):
            module.to(**to)
            return


def move_piece_by_piece(model: nn.Module, to: dict[str, Any]) -> None:
    for module in model.modules():
        if hasattr(module, "weight"):
            module.to(**to)
    model.to(**to)


def there(provider: Provider) -> dict[str, Any]:
    return {"device": provider.device, "dtype": torch.float64}


HOME: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.mark.parametrize("named", ["device", "target_device", "positional"])
def test_the_names_of_the_device(provider: Provider, named: str) -> None:
    model = mlp()
    moved = testing.moved(model, provider.device, torch.float64)
    arguments: Any = (provider.device,) if named == "positional" else ()
    keywords = {} if arguments else {named: provider.device}
    handle = DynamicSwapInstaller.install_model(
        model, *arguments, **keywords, dtype=torch.float64, provider=provider.backend
    )
    provider.handles.append(handle)
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.device == provider.device and handle.stats().bytes_moved > 0


def test_options_of_install_pass_through(provider: Provider) -> None:
    handle = install(provider, mlp(), dtype=torch.bfloat16, prefetch=3, budget="1MiB", non_blocking=True)
    assert handle.dtype is torch.bfloat16 and handle.budget == 1 << 20
    assert handle.provider == provider.backend


def test_unknown_options_are_named() -> None:
    model = mlp()
    before = trace(model)
    with pytest.raises(dynswap_ext.ConfigError, match=r"'colour', 'memory_format'; expected .*prefetch"):
        DynamicSwapInstaller.install_model(model, device="cpu", memory_format=None, colour="red")
    with pytest.raises(dynswap_ext.ConfigError, match="two names of one option"):
        DynamicSwapInstaller.install_model(model, device="cpu", target_device="meta")
    with pytest.raises(dynswap_ext.ConfigError, match=r"expected a torch\.nn\.Module"):
        DynamicSwapInstaller.install_model("model")  # type: ignore[arg-type]
    assert trace(model) == before


def test_the_class_shows_that_it_is_installed(provider: Provider) -> None:
    model = mlp()
    install(provider, model, dtype=torch.float64)
    for module in model.modules():
        cls: Any = type(module)
        assert "DynamicSwap" in cls.__name__
        original = cls.forge_backup_original_class
        assert (cls.__qualname__, cls.__module__) == (original.__qualname__, original.__module__)
        assert str(cls) == str(original)
        assert isinstance(module, original) and hasattr(module, "forge_backup_original_class")
    assert type(model[0]) is type(model[2])
    DynamicSwapInstaller.uninstall_model(model)
    assert not any(hasattr(module, "forge_backup_original_class") for module in model.modules())


def test_install_does_not_show(provider: Provider) -> None:
    """`install` and the installer have different swap classes, and each replaces the other's."""
    model = mlp()
    before = trace(model)
    install(provider, model, dtype=torch.float64)
    provider.install(model, dtype=torch.float64)
    assert type(model[0]).__name__ == "Linear" and not hasattr(model[0], "forge_backup_original_class")
    handle = install(provider, model, dtype=torch.float64)
    assert type(model[0]).__name__ == "DynamicSwap_Linear"
    handle.uninstall()
    assert trace(model) == before


def test_uninstall_leaves_no_trace(provider: Provider) -> None:
    model = TinyTransformer()
    before, state = trace(model), {k: v.clone() for k, v in model.state_dict().items()}
    install(provider, model, dtype=torch.float64)
    install(provider, model, dtype=torch.bfloat16)
    model(torch.arange(6, device=provider.device)[None])
    assert DynamicSwapInstaller.uninstall_model(model) is None
    DynamicSwapInstaller.uninstall_model(model)
    assert trace(model) == before
    testing.assert_bit_equal(model.state_dict(), state)


def test_one_module_alone(provider: Provider) -> None:
    model = nn.Sequential(mlp(), nn.Linear(16, 16))
    before = trace(model)
    for module in (model, model[1]):
        handle = DynamicSwapInstaller._install_module(
            module, device=provider.device, dtype=torch.float64, provider=provider.backend
        )
        provider.handles.append(handle)
    installed = [dynswap_ext.is_installed(module) for module in model.modules()]
    assert installed == [module in (model, model[1]) for module in model.modules()]
    assert model[1].weight.dtype == torch.float64
    DynamicSwapInstaller._uninstall_module(model)
    assert not dynswap_ext.is_installed(model) and dynswap_ext.is_installed(model[1])
    DynamicSwapInstaller._uninstall_module(model[1])
    assert trace(model) == before


def test_a_leaf_that_is_moved_there_stays_there(provider: Provider) -> None:
    model = mlp(features=768, layers=6)  # more than the native ring holds
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(2, 768)
    with torch.no_grad():
        expected = model(x)
        model[0].to(**there(provider))
        for _ in range(2):  # what was on its way is dropped
            model(x)
        handle.reset_stats()
        testing.assert_bit_equal(model(x), expected)
    assert model[0].weight is model[0]._parameters["weight"]
    assert model[0].weight.device == provider.device
    assert 0 < handle.stats().bytes_moved <= 5 * _linear_bytes(768)


def test_a_leaf_that_is_moved_home_streams_again(provider: Provider) -> None:
    model = mlp(features=768, layers=6)
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(2, 768)
    with torch.no_grad():
        expected = model(x)
        model[0].to(**there(provider))
        model(x)
        model[0].to(**HOME)
        assert model[0]._parameters["weight"].dtype == torch.float32
        handle.reset_stats()
        for _ in range(2):
            testing.assert_bit_equal(model(x), expected)
    assert model[0].weight is not model[0]._parameters["weight"]
    assert handle.stats().bytes_moved > 2 * 5 * _linear_bytes(768)


def _linear_bytes(features: int) -> int:
    return (features + 1) * features * 4


def test_a_model_moved_piece_by_piece_and_back(provider: Provider) -> None:
    model = mlp()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(2, 16)
    expected = model(x)
    move_piece_by_piece(model, there(provider))
    handle.reset_stats()
    testing.assert_bit_equal(model(x), expected)
    assert handle.stats().bytes_moved == 0
    move_piece_by_piece(model, HOME)
    testing.assert_bit_equal(model(x), expected)
    assert handle.stats().bytes_moved > 0
    testing.assert_bit_equal(model.state_dict(), state)


@pytest.mark.parametrize("make", [mlp, WithTable])
def test_faking_the_current_device(provider: Provider, make: Callable[[], nn.Module]) -> None:
    model = make()
    moved = testing.moved(model, provider.device, torch.float64)
    install(provider, model, dtype=torch.float64)
    x = provider.randn(2, 16)
    for _ in range(2):
        fake_current_device(model, there(provider))
        testing.assert_bit_equal(model(x), moved(x))
    if make is WithTable:  # the master keeps its device and dtype
        table = model._parameters["scale_shift_table"]
        assert table is not None and (table.device.type, table.dtype) == ("cpu", torch.float32)


def test_a_probe_of_every_module(provider: Provider) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(8))).eval()
    handle = install(provider, model, dtype=torch.float64)
    x = provider.randn(2, 16)

    def moved_by_a_pass() -> int:
        handle.reset_stats()
        testing.assert_bit_equal(model(x), expected)
        return handle.stats().bytes_moved

    with torch.no_grad():
        expected = [model(x) for _ in range(3)][-1]
        undisturbed = moved_by_a_pass()
        for module in model.modules():
            assert hasattr(module, "weight") == ("weight" in module._parameters)
        model(x)
        assert moved_by_a_pass() == undisturbed > 0


def test_install_on_the_cpu_switches_an_installed_model_back(
    provider: Provider, mapped: Callable[[nn.Module], nn.Module]
) -> None:
    model = mapped(mlp(features=64)).eval()
    first = install(provider, model, dtype=torch.float64)
    second = install(provider, model, device="cpu")
    x = torch.randn(2, 64)
    testing.assert_bit_equal(model(x), testing.moved(model)(x))
    assert not first.active and second.active
    assert model[0].weight.device.type == "cpu" and model[0].weight.dtype == torch.float32
    assert "DynamicSwap" in type(model[0]).__name__
