"""TorchScript, exports, and copies of a handle: they work, or an error says what to do."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, testing
from sample_models import mlp

REFUSED = {
    "trace": lambda m, x: torch.jit.trace(m, x),
    "trace around it": lambda m, x: torch.jit.trace(nn.Sequential(m, nn.ReLU()), x),
    "script": lambda m, x: torch.jit.script(m),
    "script around it": lambda m, x: torch.jit.script(nn.Sequential(nn.ReLU(), m)),
    "onnx": lambda m, x: torch.onnx.export(m, (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", REFUSED)
def test_torchscript_is_refused(provider: Provider, how: str) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    with pytest.raises(ConfigError, match=r"dynswap_ext.uninstall\(model\) first"):
        REFUSED[how](model, x)
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.active and handle.stats().bytes_moved > 0
    handle.uninstall()
    if how != "onnx":  # which needs a package
        made = REFUSED[how](model, torch.randn(2, 16))
        assert isinstance(made, torch.jit.ScriptModule)


def test_torch_export(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    exported = torch.export.export(model, (x,))
    testing.assert_bit_equal(exported.module()(x), moved(x))
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.active


class Writing(nn.Module):
    """Writes a buffer whose values are exact in both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(self.cache + x)
        self.cache[1:].add_(2)
        return x * self.cache


def test_a_strict_export_writes_the_masters(provider: Provider) -> None:
    model = Writing()
    moved = testing.moved(model, provider.device, torch.float64)
    # Not through the fixture, which asserts that nothing is held: torch keeps a program's attributes.
    handle = dynswap_ext.install(
        model, device=provider.device, provider=provider.backend, dtype=torch.float64
    )
    x = torch.arange(3.0, dtype=torch.float64).to(provider.device)
    programs = [torch.export.export(m, (x,), strict=True).module() for m in (model, moved)]
    for _ in range(3):
        testing.assert_bit_equal(programs[0](x), programs[1](x))
        testing.assert_bit_equal(model.state_dict()["cache"], moved.cache.to("cpu", torch.float32))
    handle.uninstall()


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_handle_is_not_copied(provider: Provider, how: object) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    with pytest.raises(TypeError, match="a Handle cannot be copied or pickled"):
        how(handle)  # type: ignore[operator]
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))
