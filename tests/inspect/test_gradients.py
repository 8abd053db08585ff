"""Figures of gradients of plain and installed models, compared with figures by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from dynswap_ext import ConfigError
from dynswap_ext.inspect import Gradient, gradient_flow, gradient_health
from dynswap_ext.inspect import gradients as module_of_gradients
from sample_models import Tied, TinyTransformer, mlp


def linear(weight: Any, bias: Any = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Return a layer of two by two with these gradients."""
    model = nn.Linear(2, 2, dtype=dtype)
    model.weight.grad = None if weight is None else torch.tensor(weight, dtype=dtype)
    model.bias.grad = None if bias is None else torch.tensor(bias, dtype=dtype)
    return model


def test_figures_by_hand() -> None:
    weight, bias = gradient_flow(linear([[3.0, -4.0], [0.0, 0.0]], [1.0, -1.0])).gradients
    assert weight == Gradient("weight", (2, 2), torch.float32, 1.75, 4.0, 5.0, 0, 0)
    assert bias == Gradient("bias", (2,), torch.float32, 1.0, 1.0, math.sqrt(2), 0, 0)


def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    model(torch.randn(3, 16)).sum().backward()
    expected = gradient_flow(model).gradients
    monkeypatch.setattr(module_of_gradients, "_PIECE", 7)
    for found, whole in zip(gradient_flow(model).gradients, expected, strict=True):
        assert found.norm == pytest.approx(whole.norm) and found.mean == pytest.approx(whole.mean)
        assert found.max == whole.max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_squares_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    value = float(torch.tensor(3e4 if dtype is torch.float16 else 1e30, dtype=dtype))
    (gradient, _) = gradient_flow(linear([[value, 0.0], [0.0, 0.0]], dtype=dtype)).gradients
    assert gradient.norm == pytest.approx(value)
    (gradient, _) = gradient_flow(linear([[6e-8, 0.0], [0.0, 0.0]], dtype=dtype)).gradients
    assert gradient.norm == pytest.approx(6e-8, rel=0.01)


def test_nan_and_infinite_in_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_gradients, "_PIECE", 1)
    found = gradient_health(linear([[1.0, math.nan], [math.inf, -math.inf]], [1.0, math.inf]))
    weight, bias = found.gradients
    assert (weight.nan, weight.inf, bias.nan, bias.inf) == (1, 2, 0, 1)
    assert math.isnan(weight.max or 0) and math.isnan(weight.norm or 0) and bias.max == math.inf
    assert found.nan == ("weight",) and found.inf == ("weight", "bias")
    assert found.vanishing == found.exploding == () and not found.healthy


def test_sparse_and_complex_gradients() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    (gradient,) = gradient_flow(embedding).gradients
    assert (gradient.mean, gradient.max) == (12 / 40, 2.0)  # over all forty elements; row 1 came twice
    (gradient, _) = gradient_flow(linear([[3 + 4j, 0], [0, 0]], dtype=torch.complex64)).gradients
    assert gradient.max == pytest.approx(5) and gradient.norm == pytest.approx(5)


def test_thresholds() -> None:
    model = linear([[3.0, 4.0], [0.0, 0.0]], [1e-9, 0.0])
    found = gradient_health(model)
    assert found.vanishing == ("bias",) and found.exploding == ()
    found = gradient_health(model, vanishing=0, exploding=4.9)
    assert found.vanishing == () and found.exploding == ("weight",)
    assert gradient_health(model, vanishing=1e-10, exploding=5.1).healthy
    assert gradient_health(linear([[0.0] * 2] * 2, [1.0, 1.0])).vanishing == ("weight",)


def test_total_norm_is_that_of_clipping() -> None:
    model = TinyTransformer()
    model(torch.zeros(2, 6, dtype=torch.long)).square().mean().backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    assert gradient_health(model).total_norm == pytest.approx(expected, rel=1e-5)


def test_missing_gradients() -> None:
    model = mlp(4, layers=2)
    model[0].bias.requires_grad_(False)
    assert gradient_health(model).missing == ("0.weight", "2.weight", "2.bias")
    with pytest.raises(ConfigError, match=r"none of the 3 parameters .* run backward"):
        gradient_flow(model)
    model[2](torch.ones(1, 4)).sum().backward()
    flow = gradient_flow(model)
    assert [(g.name, g.missing) for g in flow.gradients] == [
        ("0.weight", True),
        ("2.weight", False),
        ("2.bias", False),
    ]
    assert flow.gradients[0].mean is flow.gradients[0].max is flow.gradients[0].norm is None
    assert gradient_health(model).missing == ("0.weight",)


def test_an_installed_model_has_them_on_its_masters(provider: Provider) -> None:
    model = TinyTransformer()
    moved, _ = provider.pair(model, budget="24KiB")
    tokens = torch.arange(12, device=provider.device).reshape(2, 6)
    for each in (model, moved):
        each(tokens).square().mean().backward()
    found, expected = gradient_flow(model).gradients, gradient_flow(moved).gradients
    assert [g.name for g in found] == [g.name for g in expected]
    for mine, its in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert mine.norm == pytest.approx(its.norm, rel=1e-5) and mine.max == pytest.approx(its.max, rel=1e-5)
    assert gradient_health(model).healthy


def test_an_installed_model_is_not_disturbed(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    model(provider.randn(2, 16)).sum().backward()
    before = handle.stats()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    gradient_flow(model), gradient_health(model)
    assert handle.stats() == before
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_tied_weight_comes_once() -> None:
    model = Tied()
    model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
    assert [g.name for g in gradient_flow(model).gradients] == ["embedding.weight"]


def test_a_compiled_models_names_are_its_own() -> None:
    model = torch.compile(linear([[1.0] * 2] * 2, [1.0] * 2), backend="eager")
    assert [g.name for g in gradient_flow(model).gradients] == ["weight", "bias"]


def test_it_prints() -> None:
    found = gradient_health(linear([[math.nan] * 2] * 2))
    assert repr(found) == "<GradientHealth of 2 parameters: 1 missing, 1 NaN>"
    assert "missing     bias" in str(found)
    assert "findings    none" in str(gradient_health(linear([[1.0] * 2] * 2, [1.0] * 2)))
    assert "weight" in str(gradient_flow(linear([[1.0] * 2] * 2)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"vanishing": 2.0, "exploding": 1.0}, "vanishing is 2.0 and exploding is 1.0"),
        ({"vanishing": -1}, "vanishing is -1"),
        ({"vanishing": math.nan}, "vanishing is nan"),
        ({"exploding": "1"}, "a threshold is '1'"),
    ],
)
def test_bad_thresholds(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        gradient_health(linear([[1.0] * 2] * 2), **options)


def test_bad_models() -> None:
    with pytest.raises(ConfigError, match="model is a list"):
        gradient_flow([])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        gradient_health(mlp().requires_grad_(False))
