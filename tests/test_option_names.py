"""Misspelt options: the error names the nearest, on every version of Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import checkpoint, compat, planning
from dynswap_ext.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"prefech": 2}, "prefetch"),
        ({"dytpe": torch.bfloat16}, "dtype"),
        ({"device": "cpu", "bugdet": "1GiB"}, "budget"),
        ({"strict": True}, "strict_budget"),
        ({"offload_to": "cpu"}, None),
    ],
)
def test_install_names_the_nearest_option_or_all(given: dict[str, Any], meant: str | None) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"install\(\) got an unexpected keyword argument") as raised:
        dynswap_ext.install(model, **given)
    if meant is None:
        assert "expected one of model, device, dtype, prefetch, budget" in str(raised.value)
    else:
        assert str(raised.value).endswith(f". Did you mean {meant!r}?")
    assert type(model) is nn.Linear


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        (checkpoint.load, {"dytpe": torch.bfloat16}, "dtype"),
        (checkpoint.convert, {"overwite": True}, "overwrite"),
        (checkpoint.save, {"max_shard": "5GB"}, "max_shard_size"),
        (planning.plan, {"bandwith": 1e9}, "bandwidth"),
        (planning.predict, {"budget": ["1GiB"]}, "budgets"),
    ],
)
def test_other_functions_name_the_nearest_option(
    call: Callable[..., Any], given: dict[str, Any], meant: str
) -> None:
    with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
        call("model", "path", **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("6GiB", r"write budget='6GiB'$"),
        ("50%", r"write budget='50%'$"),
        ("cuda", r"write device='cuda'$"),
        (torch.device("cpu"), r"write device=device\(type='cpu'\)$"),
        (torch.bfloat16, r"write dtype=torch.bfloat16$"),
        (7, r"options are given by name: device, dtype, prefetch"),
    ],
)
def test_an_option_without_its_name_is_written_with_it(given: Any, said: str) -> None:
    install: Any = dynswap_ext.install
    with pytest.raises(TypeError, match=r"install\(\) takes model without a name, and got .* too; " + said):
        install(nn.Linear(2, 2), given)


def test_the_drop_in_names_the_nearest_option() -> None:
    with pytest.raises(ConfigError, match=r"know 'prefech'.*Did you mean 'prefetch'\?"):
        compat.DynamicSwapInstaller.install_model(nn.Linear(2, 2), prefech=2)


def test_signatures_are_the_functions_own() -> None:
    parameters = inspect.signature(dynswap_ext.install).parameters
    assert next(iter(parameters)) == "model" and parameters["prefetch"].default == 2
    assert all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert dynswap_ext.install.__doc__ and dynswap_ext.install.__module__ == "dynswap_ext.install"
