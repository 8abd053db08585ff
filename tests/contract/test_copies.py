"""Copies of installed modules are plain modules. They have what was written on handed-out tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class CopiesItself(Plain):
    """A module that copies its attributes one by one into a new object, as torch's parametrised ones do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        replica = self.__new__(type(self))
        memo[id(self)] = replica
        replica.__dict__ = copy.deepcopy(self.__dict__, memo)
        return replica

    def __copy__(self) -> CopiesItself:
        replica = self.__new__(type(self))
        replica.__dict__ = dict(self.__dict__)
        return replica


def parametrised() -> nn.Module:
    model = Plain()
    nn.utils.parametrizations.weight_norm(model.linear)
    return model


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(Plain())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "parametrised": parametrised,
    "with a __deepcopy__ of its own": CopiesItself,
    "torch.fx": traced,
}


@pytest.mark.parametrize("held", [True, False], ids=["held", "dropped"])
@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_deepcopy(provider: Provider, make: Callable[[], nn.Module], budget: str | None, held: bool) -> None:
    model = make()
    provider.install(model, dtype=torch.float64, budget=budget)
    linear: Any = model.get_submodule("linear")
    written = [linear.bias, model.scale]
    with torch.no_grad():
        for value, tensor in enumerate(written):
            tensor.fill_(value + 2.0)  # type: ignore[operator]
    if not held:
        written.clear()
        del tensor
    copied = copy.deepcopy(model)
    assert not any(map(dynswap_ext.is_installed, copied.modules()))
    assert [type(module).__qualname__ for module in copied.modules()] == [
        type(module).__qualname__ for module in make().modules()
    ]
    assert copied.get_parameter("linear.bias").tolist() == [2.0] * 4
    assert copied.get_parameter("scale").tolist() == [3.0] * 4
    for name, parameter in copied.named_parameters():
        assert (parameter.device.type, parameter.dtype) == ("cpu", torch.float32), name
    x = provider.randn(2, 4, dtype=torch.float64)
    moved = testing.moved(copied, provider.device, torch.float64)
    testing.assert_bit_equal(model(x).detach(), moved(x).detach(), "output")
    assert dynswap_ext.is_installed(model)


def test_a_shallow_copy_of_its_own_is_plain(provider: Provider) -> None:
    model = CopiesItself()
    provider.install(model, dtype=torch.float64)
    with torch.no_grad():
        model.scale.fill_(3.0)
    copied = copy.copy(model)
    assert type(copied) is CopiesItself and not dynswap_ext.is_installed(copied)
    assert copied.scale is model._parameters["scale"] and copied.scale.tolist() == [3.0] * 4
    assert dynswap_ext.is_installed(model) and model.scale.dtype == torch.float64


def test_pickle(provider: Provider) -> None:
    model = CopiesItself()
    provider.install(model, dtype=torch.float64)
    kept = model.scale
    with torch.no_grad():
        kept.fill_(3.0)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is CopiesItself and loaded.scale.tolist() == [3.0] * 4


class CopiesSlots(nn.Linear):
    __slots__ = ("extra",)

    def __copy__(self) -> CopiesSlots:
        replica = self.__new__(type(self))
        replica.__dict__ = dict(self.__dict__)
        replica.extra = self.extra
        return replica


def test_a_copier_of_a_class_gets_the_module_itself(provider: Provider) -> None:
    model = CopiesSlots(4, 4)
    model.extra = 7
    provider.install(model, dtype=torch.float64)
    replica = copy.copy(model)
    assert type(replica) is CopiesSlots and replica.extra == 7


class Forwards(nn.Module):
    """A wrapper that looks up missing attributes in the wrapped module, as in peft and torch.compile."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.extra = inside, nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inside":
                raise
            return getattr(self.inside, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.extra(self.inside(x))  # type: ignore[no-any-return]


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deep", "flat", "pickle"],
)


@COPIES
def test_a_copy_of_a_wrapper_that_forwards_attributes(
    provider: Provider, copied: Callable[[nn.Module], nn.Module]
) -> None:
    wrapper = Forwards(Plain())
    provider.install(wrapper.inside, dtype=torch.float32)
    expected = {name: t.clone() for name, t in wrapper.state_dict().items()}
    made = copied(wrapper)
    assert type(made) is Forwards
    testing.assert_bit_equal(dict(made.state_dict()), expected, "state")
    assert dynswap_ext.is_installed(made.inside) == (copied is copy.copy)
    assert dynswap_ext.is_installed(wrapper.inside)


def test_a_copy_of_a_compiled_model(provider: Provider) -> None:
    model = Plain()
    provider.install(model, dtype=torch.float32)
    compiled = torch.compile(model, backend="eager")
    made = copy.deepcopy(compiled)
    assert type(made) is type(compiled) and not dynswap_ext.is_installed(made._orig_mod)
    assert made.state_dict().keys() == compiled.state_dict().keys()


def test_a_copy_that_joins_an_install_is_cast_as_the_original(provider: Provider) -> None:
    model = nn.ModuleList([Plain()])
    provider.install(model, dtype=torch.bfloat16)
    model.append(copy.deepcopy(model[0]))
    assert model[1].scale.dtype == torch.bfloat16


SAVES: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "torch.save": lambda object: torch.save(object, io.BytesIO()),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("mapped", [False, True], ids=["in RAM", "mapped"])
@pytest.mark.parametrize("saved", SAVES.values(), ids=SAVES)
def test_after_data_was_assigned(
    provider: Provider, saved: Callable[[Any], Any], mapped: bool, tmp_path: Path
) -> None:
    """A model can be saved and copied after `.data` was assigned, as peft does to merge DoRA, IA3 and OFT."""
    model = Plain()
    if mapped:
        testing.map_from_file(model, tmp_path / "masters.pt")
    handle = provider.install(model, dtype=None if mapped else torch.float64)
    kept = model.linear.weight
    for tensor in (kept, model.linear.bias):
        tensor.data = tensor.data * 2
    masters = [*model.parameters(), *model.linear.parameters()]
    for held in (True, False):
        assert all(not vars(master) for master in masters)
        saved(model)
        saved(masters)
        saved(model.state_dict())
        if held:
            del kept, tensor
    handle.uninstall()
    assert all(not vars(master) for master in masters)
    saved(model)
