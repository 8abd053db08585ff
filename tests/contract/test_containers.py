"""Containers of installed modules that are changed during the install."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from oracle import assert_same_training_step, master_bytes
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from sample_models import mlp

Change = Callable[[nn.Sequential], nn.Sequential]


def reverse(model: nn.Sequential) -> nn.Sequential:
    layers = list(model)
    for i, layer in enumerate(reversed(layers)):
        model[i] = layer
    return model


def pop(model: nn.Sequential) -> nn.Sequential:
    model.pop(1)
    return model


def delete_slice(model: nn.Sequential) -> nn.Sequential:
    del model[1:3]
    return model


def insert_one_of_its_own(model: nn.Sequential) -> nn.Sequential:
    return model.insert(1, model[4])


def append_one_of_its_own(model: nn.Sequential) -> nn.Sequential:
    return model.append(model[0])


def replace_with_one_of_its_own(model: nn.Sequential) -> nn.Sequential:
    model[2] = model[0]
    return model


def extend_by_a_slice(model: nn.Sequential) -> nn.Sequential:
    return model.extend(model[2:])


CHANGES: list[Change] = [
    lambda m: m[:3],
    lambda m: m[::2],
    lambda m: m[2:] + m[:2],
    lambda m: m * 2,
    reverse,
    pop,
    delete_slice,
    insert_one_of_its_own,
    append_one_of_its_own,
    replace_with_one_of_its_own,
    extend_by_a_slice,
]
NAMES = ["slice", "step", "sum", "product", *(c.__name__ for c in CHANGES[4:])]


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_a_changed_sequential(provider: Provider, change: Change) -> None:
    model = mlp()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    testing.assert_bit_equal(model(x), moved(x), "output before")
    changed, expected = change(model), change(moved)
    assert list(changed.state_dict()) == list(expected.state_dict())
    assert_same_training_step(changed, expected, lambda m: m(x), close=True)
    assert handle.stats().bytes_moved >= master_bytes(changed)


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_uninstall_after_a_change(provider: Provider, change: Change) -> None:
    model, plain = mlp(), mlp()
    plain.load_state_dict(model.state_dict())
    members = list(model)
    handle = provider.install(model, dtype=torch.float64)
    changed, expected = change(model), change(plain)
    handle.uninstall()  # also of members that have left the tree
    assert not any(dynswap_ext.is_installed(m) for m in (model, changed, *members))
    assert [type(m) for m in changed.modules()] == [type(m) for m in expected.modules()]
    x = torch.randn(3, 16)
    testing.assert_bit_equal(changed(x), expected(x), "output")


def test_a_member_that_left_still_works_and_so_does_the_rest(provider: Provider) -> None:
    model = mlp()
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16)
    gone, expected = model.pop(2), moved.pop(2)
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(gone(x), expected(x), "the one that left")
            testing.assert_bit_equal(model(x), moved(x), "the rest")
    dynswap_ext.uninstall(gone)
    assert type(gone) is nn.Linear


def append(m: nn.Sequential, layer: nn.Module) -> None:
    m.append(layer)


def insert(m: nn.Sequential, layer: nn.Module) -> None:
    m.insert(0, layer)


def replace(m: nn.Sequential, layer: nn.Module) -> None:
    m[2] = layer


def extend(m: nn.Sequential, layer: nn.Module) -> None:
    m.extend([layer])


def add_module(m: nn.Sequential, layer: nn.Module) -> None:
    m.add_module("added", layer)


HOW = (append, insert, replace, extend, add_module)


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_plain_member_joins_the_install(
    provider: Provider, how: Callable[[nn.Sequential, nn.Module], None]
) -> None:
    model = mlp(layers=2)
    moved, handle = provider.pair(model)
    new = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    master, values = new[0].weight, new[0].weight.detach().clone()
    how(moved, testing.moved(new, provider.device, torch.float64))
    how(model, new)
    assert all(dynswap_ext.is_installed(m) for m in new.modules())
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert new[0]._parameters["weight"] is master and master.grad is not None
    assert handle.stats().bytes_moved >= master_bytes(model)
    handle.uninstall()
    assert [type(m) for m in new.modules()] == [nn.Sequential, nn.Linear, nn.Tanh]
    assert new[0].weight is master
    testing.assert_bit_equal(master.detach(), values, "master")


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_member_that_joined_and_left_is_freed_with_its_last_reference(
    provider: Provider, how: Callable[[nn.Sequential, nn.Module], None]
) -> None:
    model = mlp(layers=2)
    provider.pair(model)
    new = nn.Linear(16, 16)
    how(model, new)
    with torch.no_grad():
        model(provider.randn(3, 16))
    for name, member in list(model.named_children()):
        if member is new:
            delattr(model, name)
    gone, master = weakref.ref(new), weakref.ref(new._parameters["weight"])
    del new, member
    gc.collect()
    assert gone() is None
    assert master() is None


def test_a_member_that_is_installed_by_itself(provider: Provider) -> None:
    model, new = mlp(layers=2), nn.Linear(16, 16)
    moved, _ = provider.pair(model)
    moved_new, other = provider.pair(new)
    model.append(new)
    moved.append(moved_new)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert other.stats().bytes_moved >= master_bytes(new)
    provider.handles[0].uninstall()
    assert dynswap_ext.is_installed(new)
    assert not dynswap_ext.is_installed(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        self.scales = nn.ParameterList([nn.Parameter(torch.full((16,), float(i))) for i in (1, 2)])
        self.shifts = nn.ParameterDict({"low": nn.Parameter(torch.full((16,), -1.0))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.named.values():
            x = layer(x)
        for scale in self.scales:
            x = x * scale
        for shift in self.shifts.values():
            x = x + shift
        return x


def test_lists_and_dicts(provider: Provider) -> None:
    model = Branches()
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    assert_same_training_step(model, moved, lambda m: m(x))
    assert handle.stats().bytes_moved >= master_bytes(model)
    for m in (model, moved):
        m.layers.insert(0, m.layers[2])
        del m.layers[1]
        m.layers.extend([m.named.pop("a")])
        m.named["c"] = m.layers[0]
        m.named.update({"b": m.layers[1]})
        m.layers += [m.layers[0]]
    assert_same_training_step(model, moved, lambda m: m(x), close=True)
    assert [type(m) for m in model.layers[:2]] == [type(model.layers[0])] * 2
    assert type(model.layers[:2]) is nn.ModuleList


def test_a_module_shared_by_two_installed_containers(provider: Provider) -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.GELU()), "b": nn.Sequential(shared)})
    moved, handle = provider.pair(model)
    x = provider.randn(3, 16)
    assert model["a"][0] is model["b"][0]
    assert_same_training_step(model, moved, lambda m: m["b"](m["a"](x)), close=True)
    assert handle.stats().bytes_moved >= master_bytes(shared)
