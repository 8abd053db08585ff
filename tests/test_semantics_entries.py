"""Entries of every kind: None, integer, complex, scalar, strided, added and removed during an install."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import testing
from dynswap_ext.errors import ConfigError
from sample_models import mlp


def test_a_none_entry_that_gets_a_value(provider: Provider) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("cache", None)
    provider.pair(model)
    model.cache = torch.ones(4)
    model.bias = nn.Parameter(torch.ones(4))
    for value in (model.cache, model.bias):
        assert value.dtype == torch.float64
        assert value.device == provider.device
    model.cache = None
    model.bias = None
    assert model.cache is None
    assert model.bias is None
    assert "bias" in model._parameters


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # the moved copy's
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=lambda d: str(d)[6:]
)
def test_only_floating_masters_are_cast(provider: Provider, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("table", torch.arange(6).to(dtype))
    model.register_buffer("scale", torch.ones(3))
    provider.pair(model)
    testing.assert_bit_equal(model.table, torch.arange(6).to(provider.device, dtype))
    assert model.scale.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_floating_dtype_is_cast_as_torch_casts(provider: Provider, dtype: torch.dtype) -> None:
    model = nn.Module()
    values = torch.cat([torch.randn(61) * 10, torch.tensor([0.0, -0.0, float("inf")])])
    model.register_buffer("wide", values)
    model.register_buffer("narrow", values.to(dtype))
    provider.install(model, dtype=torch.float32)
    testing.assert_bit_equal(model.narrow, values.to(dtype).to(provider.device, torch.float32))
    if dtype.itemsize > 1:  # layers compute in no other
        provider.install(model, dtype=dtype)
        testing.assert_bit_equal(model.wide, values.to(provider.device, dtype))


EIGHT_BITS = [dtype for name, dtype in vars(torch).items() if name.startswith("float8_")]


@pytest.mark.parametrize(
    "wanted", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_every_value_of_eight_bits(
    provider: Provider, dtype: torch.dtype, wanted: torch.dtype | None
) -> None:
    model, stored = nn.Module(), torch.arange(256, dtype=torch.uint8).view(dtype)
    model.weight = nn.Parameter(stored, requires_grad=False)
    model.register_buffer("table", stored.clone())
    model.register_buffer("other", torch.ones(3, dtype=torch.float64))
    provider.install(model, dtype=wanted, budget="1MiB")
    expected = stored.to(wanted or dtype)
    # A GPU may give a NaN other bits than a CPU, also in torch's own cast.
    nan = expected.double().isnan() if wanted and provider.device.type != "cpu" else torch.zeros(256).bool()
    for _ in range(3):
        for given in (model.weight, model.table):
            assert given.dtype == expected.dtype and given.device == provider.device
            found = given.cpu()
            assert found[nan].double().isnan().all()
            testing.assert_bit_equal(found[~nan].view(torch.uint8), expected[~nan].view(torch.uint8))
        assert model.other.dtype == (wanted or torch.float64)


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float4_e2m1fn_x2], ids=str)
def test_a_dtype_that_no_layer_computes_in_is_refused(provider: Provider, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"torch\.bfloat16.*checkpoint\.convert"):
        provider.install(model, dtype=dtype)
    assert type(model) is nn.Linear


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(()),
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(12)[2:8:2],
        lambda: torch.randn(3, 1).expand(3, 5),
        lambda: torch.randn(3, 7)[:, 1:],
    ],
    ids=["scalar", "transposed", "channels_last", "strided slice", "expanded", "column slice"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_shapes_and_strides(provider: Provider, make: object, dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("table", make())  # type: ignore[operator]
    expected = model._buffers["table"].to(provider.device, dtype)
    provider.install(model, dtype=dtype)
    testing.assert_bit_equal(model.table, expected)
    if expected.dtype != torch.float32:
        assert model.table.stride() == expected.stride()


def test_registered_after_the_install(provider: Provider) -> None:
    model = mlp(layers=1)
    provider.pair(model)
    model.extra = nn.Parameter(torch.randn(3))
    model.register_buffer("late", torch.arange(3.0))
    model.register_buffer("integers", torch.arange(3))
    assert model.extra.dtype == model.late.dtype == torch.float64
    assert model.integers.dtype == torch.int64
    assert model.integers.device == model.late.device == provider.device
    assert model.extra is model.extra or provider.native
    model.extra.sum().backward()
    assert model._parameters["extra"].grad.tolist() == [1, 1, 1]
