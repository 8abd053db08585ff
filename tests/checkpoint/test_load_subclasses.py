"""Tensor subclasses and checkpoint.load: in the model, in the file, or made by a transform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_loads import saved
from torch import nn

from conftest import Provider
from dynswap_ext import checkpoint, testing
from dynswap_ext._util.file_mappings import mapped_ranges
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext.errors import ConfigError, SourceError
from sample_subclasses import ScaledInt8, quantised_mlp

MiB = 1 << 20


def quantise(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return ScaledInt8.quantise(tensor) if name.endswith("weight") else tensor


def quantised(plain: nn.Module) -> nn.Module:
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(ScaledInt8.quantise(module.weight), requires_grad=False)
    return plain


@pytest.fixture
def quantised_file(tmp_path: Path) -> Iterator[Path]:
    torch.save(quantised_mlp(layers=4).state_dict(), tmp_path / "quantised.pt")
    with torch.serialization.safe_globals([ScaledInt8]):
        yield tmp_path / "quantised.pt"


def linears(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))


def frozen() -> nn.Module:
    return linears(4).requires_grad_(False)


def test_streamed_after_a_transform_as_resident(provider: Provider, tmp_path: Path) -> None:
    reference = linears(4)
    model = checkpoint.load(frozen, saved(reference, tmp_path / "w"), transform=quantise)
    resident = testing.moved(quantised(reference), provider.device)
    assert type(model[0].weight) is ScaledInt8 and isinstance(model[0].weight, nn.Parameter)
    provider.install(model, budget="8KiB")
    x = provider.randn(3, 16, dtype=torch.float32)
    for _ in range(2):
        testing.assert_bit_equal(model(x), resident(x))


def test_memory_of_quantising_is_the_result_and_some_windows(tmp_path: Path) -> None:
    def layers(width: int = 1024) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(32)))

    checkpoint.load(lambda: layers(64), saved(layers(64), tmp_path / "s"), transform=quantise)
    path = saved(layers(), tmp_path / "w")  # 128 MiB, 32 MiB when quantised
    meter = PeakMemory()
    model = checkpoint.load(layers, path, transform=quantise)
    growth = meter.more()
    if growth is None:
        pytest.skip("the system does not tell the highest memory")
    # Temporaries in quantise() take three times the bytes that are read before free memory is returned.
    assert growth < (32 + 4 * 16 + 8) * MiB
    assert type(model[31].weight) is ScaledInt8


def test_a_plain_file_into_a_quantised_model(tmp_path: Path) -> None:
    source, model = linears(), quantised_mlp()
    weights = [module.weight for module in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.load(model, saved(source, tmp_path / "w"), assign=False)
    assert [type(module.weight) for module in model] == [ScaledInt8] * 3
    assert all(module.weight is weight for module, weight in zip(model, weights, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    x = torch.randn(2, 16)
    assert torch.equal(model(x), quantised(source)(x))
    assert not any(
        parameter.requires_grad for name, parameter in model.named_parameters() if "weight" in name
    )


def test_the_same_into_an_installed_model(provider: Provider, tmp_path: Path) -> None:
    source, model = linears(), quantised_mlp()
    provider.install(model)
    x = provider.randn(2, 16, dtype=torch.float32)
    with torch.no_grad():
        model(x)
        checkpoint.load(model, saved(source, tmp_path / "w"), assign=False)
        resident = testing.moved(quantised(source), provider.device)
        testing.assert_bit_equal(model(x), resident(x))


@pytest.mark.parametrize("meta", [False, True])
def test_a_file_of_subclasses_becomes_the_masters(
    meta: bool, provider: Provider, quantised_file: Path
) -> None:
    model = checkpoint.init_empty(frozen) if meta else frozen()
    parameters = list(model.parameters())
    checkpoint.load(model, quantised_file)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(parameters[0]) is ScaledInt8
    payload = parameters[0].payload.data_ptr()
    assert any(start <= payload < start + size for start, size in mapped_ranges(quantised_file))
    resident = quantised_mlp(layers=4)
    resident.load_state_dict(torch.load(quantised_file), assign=True)
    resident = testing.moved(resident, provider.device)
    provider.install(model, budget="8KiB")
    x = provider.randn(3, 16, dtype=torch.float32)
    testing.assert_bit_equal(model(x), resident(x))


def test_a_file_of_subclasses_is_dequantised_into_plain_parameters(quantised_file: Path) -> None:
    model = linears(4)
    weight = model[0].weight
    checkpoint.load(model, quantised_file, assign=False)
    assert model[0].weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    assert torch.equal(weight, torch.load(quantised_file)["0.weight"].dequantise())


def test_a_class_that_was_not_declared_safe(tmp_path: Path) -> None:
    torch.save(quantised_mlp().state_dict(), tmp_path / "w")
    with pytest.raises(SourceError, match="holds more than tensors"):
        checkpoint.load(linears, tmp_path / "w")
    model = checkpoint.load(lambda: linears().requires_grad_(False), tmp_path / "w", weights_only=False)
    assert type(model[0].weight) is ScaledInt8


class Frozen(ScaledInt8):
    """Refuses gradients, as quantised blocks do."""

    def requires_grad_(self, requires_grad: bool = True) -> Frozen:
        if requires_grad:
            raise RuntimeError("cannot be trained")
        return self

    def _with(self, *args: Any) -> Frozen:
        made = super()._with(*args)
        return Frozen(made.payload, made.scale, made.tag, made.dtype)


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_no_gradient_is_not_trained(fails: bool, tmp_path: Path) -> None:
    def transform(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != "0.weight":
            return tensor
        return Frozen(tensor.to(torch.int8), torch.ones(16, 1), "frozen")

    source, model = linears(), linears()
    if fails:
        model.register_load_state_dict_post_hook(lambda m, keys: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoint.load(model, saved(source, tmp_path / "w"), transform=transform)
    else:
        checkpoint.load(model, saved(source, tmp_path / "w"), transform=transform)
        assert type(model[0].weight) is Frozen
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert trained.pop("0.weight") is fails and all(trained.values())


@pytest.mark.parametrize("assign", [True, False])
def test_under_torchs_own_switch(assign: bool, tmp_path: Path) -> None:
    source, model = linears(), linears()
    path = saved(source, tmp_path / "w")
    parameters = list(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        checkpoint.load(model, path, assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    testing.assert_bit_equal(dict(model.state_dict()), dict(source.state_dict()), "state")


def test_a_module_load_that_breaks_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.module_load:
            return args[0]
        return usual(func, types, args, kwargs)

    usual = ScaledInt8.__torch_function__
    monkeypatch.setattr(ScaledInt8, "__torch_function__", classmethod(careless))
    with pytest.raises(ConfigError, match=r"ScaledInt8\.module_load returned one of its arguments"):
        checkpoint.load(quantised_mlp(), saved(linears(), tmp_path / "w"), assign=False)
