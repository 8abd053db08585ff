"""Casts of an installed model: what they change, and when they warn. See Note [Masters that are cast]."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(),
    "to dtype": lambda m: m.to(torch.float16),
    "apply": lambda m: m._apply(lambda t: t.half()),
}


def told(
    provider: Provider, model: nn.Module, cast: str, dtype: torch.dtype | None, times: int = 2
) -> list[str]:
    """Cast an installed model to float16 and back; return the warnings."""
    x = provider.randn(3, 16, dtype=dtype or torch.float32)
    provider.install(model, dtype=dtype)
    model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            CASTS[cast](model)
            plain = testing.moved(model, provider.device, dtype)
            y = x.to(plain[0].weight.dtype)
            testing.assert_bit_equal(model(y), plain(y))
            model.float()
    return [str(w.message) for w in caught if issubclass(w.category, dynswap_ext.DynswapWarning)]


@pytest.mark.parametrize("cast", CASTS)
def test_without_a_dtype_nothing_is_to_be_told(provider: Provider, cast: str) -> None:
    """Without dtype=, a cast needs no warning: the next call computes in the masters' dtype."""
    assert told(provider, mlp(), cast, None) == []


@pytest.mark.parametrize("cast", CASTS)
def test_with_one_it_remains_that_of_the_compute(provider: Provider, cast: str) -> None:
    model = mlp()
    [text] = told(provider, model, cast, torch.float64)
    assert "is installed with dtype=torch.float64 and still computes in that" in text
    assert "call dynswap_ext.install(model, dtype=torch.float16) instead" in text
    dynswap_ext.install(model, device=provider.device, dtype=torch.float16, provider=provider.backend)
    assert model[0].weight.dtype == torch.float16
    dynswap_ext.uninstall(model)


def test_into_the_dtype_of_the_compute(provider: Provider) -> None:
    model = mlp()
    handle = provider.install(model, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.double()
    assert handle.uninstall() is None and model[0].weight.dtype == torch.float64


def test_masters_in_a_file_are_read(provider: Provider, tmp_path: Path) -> None:
    model = testing.map_from_file(mlp(), tmp_path / "masters.pt")
    [text] = told(provider, model, "half", None)
    assert "mapped from a file; the cast to torch.float16 has read its masters" in text
    assert "install(model, dtype=torch.float16)" in text


def test_a_warning_that_is_an_error_leaves_all_of_the_model_cast(provider: Provider) -> None:
    model = mlp()
    provider.install(model, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dynswap_ext.DynswapWarning, match="still computes in that"):
            model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(3, 16)
    testing.assert_bit_equal(model(x), moved(x))


class Head(nn.Module):
    """A layer that casts its input to the dtype of its weight, as peft's do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("what", ["wider", "narrower", "copy", "tie", "another master"])
def test_what_comes_later(provider: Provider, what: str) -> None:
    """Weights of a new module are not rounded to dtype=; copies, ties and replaced masters are cast as ever.

    See Note [What dtype= casts].
    """
    half, wide = torch.bfloat16, torch.float32
    model = nn.ModuleList([Head(), Head()])
    provider.install(model, dtype=half)
    late = Head().to(wide if what == "wider" else torch.float64)
    dtype = half
    if what == "wider":
        dtype = wide
    elif what == "narrower":
        late, dtype = Head().to(torch.float8_e4m3fn), half
    elif what == "copy":
        late = copy.deepcopy(model[0])
        assert late.layer.weight.dtype == wide and type(late) is Head
    elif what == "tie":
        for name in ("weight", "bias"):
            setattr(late.layer, name, model[0].layer.get_parameter(name))
    else:
        late = model[1]
        state = {name: torch.randn_like(value) for name, value in late.state_dict().items()}
        late.load_state_dict(state, assign=True)
    model.append(late)
    x = provider.randn(3, 16, dtype=half)
    for _ in range(3):
        assert late.layer.weight.dtype == dtype
        moved = testing.moved(late, provider.device, dtype)
        testing.assert_bit_equal(late(x), moved(x))
