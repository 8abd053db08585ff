"""What cannot be installed. A failed install leaves the model as it was."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import DynswapWarning, testing
from dynswap_ext._python.session import Session as PythonSession
from dynswap_ext._swap import class_swap
from dynswap_ext._swap.class_swap import is_swap_class
from sample_models import ConvNet, mlp, trace


def swapped(model: nn.Module) -> list[bool]:
    return [is_swap_class(type(module)) for module in model.modules()]


def test_a_failed_second_install_leaves_the_first(provider: Provider) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(2, 16)
    for part in (model, model[0]):
        with pytest.raises(dynswap_ext.BudgetError):
            provider.install(part, dtype=torch.float64, budget=100)
        assert handle.active
        assert all(swapped(model))
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
        assert handle.stats().hits + handle.stats().misses > 0  # none of its weights is moved again
    handle.uninstall()
    assert not any(swapped(model))


@pytest.mark.parametrize("automatic", [False, True])
def test_a_refused_second_install_leaves_what_was_tuned(provider: Provider, automatic: bool) -> None:
    model = mlp(64, 6).eval()
    budget = 3 * (64 * 64 + 64) * 8 + 6 * 4096
    moved, handle = provider.pair(model, budget="minimum")
    x = provider.randn(2, 64)
    handle.retune("auto" if automatic else budget)
    for _ in range(5):
        model(x)
    tuned, known = handle.budget, handle.tuning
    assert known is not None and (automatic or tuned == budget)
    handle.retune("auto" if automatic else 2 * budget)  # not yet in use
    with pytest.raises(dynswap_ext.BudgetError):
        provider.install(model, dtype=torch.float64, budget=100)
    assert handle.active and handle.automatic is automatic
    assert handle.budget == tuned and handle.tuning == known
    for _ in range(5):
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.tuning is not known and (automatic or handle.budget == 2 * budget)
    assert handle.stats().resident_groups


def test_a_plan_that_failed_is_made_when_there_is_room(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider.native:
        pytest.skip("its plans fail in C++, where tests/cuda/test_cuda_plans.py has them fail")
    model = mlp(64, 3).eval()
    moved, handle = provider.pair(model, budget="1MiB")
    x = provider.randn(2, 64)
    testing.assert_bit_equal(model(x), moved(x))
    for each in (model, moved):
        each.append(nn.Linear(64, 64).requires_grad_(False))
        each[-1].get_parameter("weight").fill_(0.5)
        each[-1].get_parameter("bias").fill_(1)
    moved[-1].to(provider.device, torch.float64)
    groups = handle.stats().groups

    def no_room(*_: object) -> None:
        raise dynswap_ext.errors.OutOfMemoryError("no room at this moment")

    with monkeypatch.context() as now:
        now.setattr(PythonSession, "_make_plan", no_room)
        with pytest.warns(dynswap_ext.DynswapWarning, match="no new plan fits"):
            testing.assert_bit_equal(model(x), moved(x))
        testing.assert_bit_equal(model(x), moved(x))
        assert handle.stats().groups == groups
    testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().groups == groups + 2


def test_an_install_whose_budget_holds_its_masters_no_more_is_put_back(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("it plans nothing that it would warn of, and is not refused so late")
    model = mlp(16, 3).eval()
    _, handle = provider.pair(model, budget="64KiB")
    model.append(nn.Linear(16, 4096).requires_grad_(False))
    moved = testing.moved(model, provider.device, torch.float64)
    x = provider.randn(2, 16)
    with pytest.warns(dynswap_ext.DynswapWarning, match="no new plan fits"):
        testing.assert_bit_equal(model(x), moved(x))
    with (
        warnings.catch_warnings(),
        pytest.warns(dynswap_ext.DynswapWarning, match="smallest budget that works .* has now"),
    ):
        warnings.filterwarnings("error", "prefetch is 50", dynswap_ext.DynswapWarning)
        with pytest.raises(dynswap_ext.DynswapWarning, match="prefetch is 50"):
            provider.install(model, dtype=torch.float64, prefetch=50)
    assert handle.active and (handle.budget or 0) > 512 << 10
    testing.assert_bit_equal(model(x), moved(x))


def test_a_swap_that_fails_halfway(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ConvNet()
    before = trace(model)
    install = importlib.import_module("dynswap_ext._installation")

    def fails(cls: type, attribute: type, dress: object) -> type | None:
        if cls is nn.Linear:
            raise MemoryError("no class for you")
        return original(cls, attribute, dress)

    original = install.swap_class
    monkeypatch.setattr(install, "swap_class", fails)
    with pytest.raises(MemoryError, match="no class"):
        provider.install(model, dtype=torch.float64)
    assert trace(model) == before


def test_a_descriptor_that_cannot_be_made(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """An install that fails for one descriptor leaves the model plain.

    Pure Python has swapped classes by then.
    """

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late_name = nn.Parameter(torch.ones(2))

    def fails(name: str) -> object:
        if name == "late_name":
            raise MemoryError("no descriptor for you")
        return original(name)

    original = class_swap.live
    monkeypatch.setattr(class_swap, "live", fails)
    model = nn.Sequential(nn.Linear(4, 4), Late())
    before = trace(model)
    with pytest.raises(MemoryError, match="no descriptor"):
        provider.install(model, dtype=torch.float64)
    assert trace(model) == before


def test_masters_on_meta_are_named(provider: Provider) -> None:
    model = mlp()
    model[2].to("meta")
    model[4].to("meta")
    before = trace(model)
    with pytest.raises(dynswap_ext.ConfigError) as raised:
        provider.install(model)
    assert "4 master(s)" in str(raised.value)
    assert "2.weight, 2.bias, 4.weight, 4.bias" in str(raised.value)
    assert "dynswap_ext.checkpoint.load(model, path)" in str(raised.value)
    assert trace(model) == before


def test_at_most_five_meta_masters_are_named(provider: Provider) -> None:
    with pytest.raises(dynswap_ext.ConfigError, match=r"4\.weight and 3 more\. Load"):
        provider.install(mlp(layers=4).to("meta"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_script_module_is_not_said_to_have_no_weights(provider: Provider) -> None:
    scripted = torch.jit.script(nn.Linear(16, 16))
    with pytest.warns(dynswap_ext.DynswapWarning) as caught:
        provider.install(scripted)
    assert [str(w.message)[:32] for w in caught] == ["1 TorchScript module(s) are left"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_script_modules_are_left_alone_with_one_warning(provider: Provider) -> None:
    scripted = torch.jit.script(nn.Linear(16, 16).to(provider.device, torch.float64))
    traced = torch.jit.trace(nn.Linear(16, 16).to(provider.device, torch.float64), provider.randn(2, 16))
    model = nn.Sequential(nn.Linear(16, 16), scripted, nn.Linear(16, 16), traced)
    cls = type(scripted)
    with pytest.warns(dynswap_ext.DynswapWarning) as caught:
        handle = provider.install(model, dtype=torch.float64)
    assert [str(w.message)[:32] for w in caught] == ["2 TorchScript module(s) are left"]
    assert type(scripted) is cls
    model(provider.randn(2, 16))
    assert handle.stats().bytes_moved > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.uninstall()
    assert type(model[0]) is nn.Linear


def test_only_modules_can_be_installed() -> None:
    with pytest.raises(dynswap_ext.ConfigError, match="Tensor"):
        dynswap_ext.install(torch.ones(2))  # type: ignore[arg-type]


def test_a_warning_that_is_an_error_leaves_the_model_alone(provider: Provider) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    before = trace(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DynswapWarning)
        with pytest.raises(DynswapWarning, match="TorchScript"):
            provider.install(model, dtype=torch.float64)
    assert trace(model) == before
    assert not dynswap_ext.is_installed(model)
