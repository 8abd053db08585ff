"""Attributes of an installed module are set, deleted, registered and looked up as a plain module's are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import assert_gradients_as_moved
from torch import nn

from conftest import Provider
from dynswap_ext import testing

Change = Callable[[nn.Module], object]


def said(change: Change, model: nn.Module) -> str:
    """Return the error that a change raises, or "fine"."""
    try:
        change(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


CHANGES: dict[str, Change] = {
    "a tensor for a parameter": lambda m: setattr(m, "weight", torch.ones(4, 4)),
    "a number for a parameter": lambda m: setattr(m, "bias", 1),
    "a number for a buffer": lambda m: setattr(m, "table", 1),
    "a parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 4))),
    "a parameter for a buffer": lambda m: setattr(m, "table", nn.Parameter(torch.ones(4))),
    "a buffer object": lambda m: setattr(m, "table", nn.Buffer(torch.ones(4))),
    "a module for a parameter": lambda m: setattr(m, "weight", nn.ReLU()),
    "None": lambda m: setattr(m, "bias", None),
    "None for a buffer": lambda m: setattr(m, "table", None),
    "a new parameter": lambda m: setattr(m, "extra", nn.Parameter(torch.ones(2))),
    "a new plain tensor": lambda m: setattr(m, "extra", torch.ones(2)),
    "delete": lambda m: delattr(m, "bias"),
    "delete a buffer": lambda m: delattr(m, "table"),
    "a plain value for what was deleted": lambda m: (delattr(m, "table"), setattr(m, "table", "plain")),
    "delete what is not there": lambda m: delattr(m, "nothing"),
    "register again": lambda m: m.register_parameter("weight", nn.Parameter(torch.ones(4, 4))),
    "register None": lambda m: m.register_parameter("bias", None),
    "register under a dotted name": lambda m: m.register_parameter("a.b", None),
    "register under no name": lambda m: m.register_buffer("", None),
    "register no parameter": lambda m: m.register_parameter("extra", torch.ones(2)),
    "register a result": lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2)) * 1),
    "register over a method": lambda m: m.register_buffer("forward", torch.ones(2)),
    "register over a plain attribute": lambda m: m.register_buffer("in_features", torch.ones(2)),
    "register a parameter's name as a buffer": lambda m: m.register_buffer("weight", torch.ones(2)),
    "register no tensor": lambda m: m.register_buffer("extra", 3),
    "register a buffer": lambda m: m.register_buffer("extra", torch.ones(2)),
}


NAMES = ("weight", "bias", "table", "extra")
CONTAINERS = ("_parameters", "_buffers", "_modules")


def with_table() -> nn.Linear:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0))
    return model


def contents(model: nn.Module) -> dict[str, Any]:
    """Return the names of every kind in order, what they hold, and what the attributes give."""
    values = {name: getattr(model, name, "nothing") for name in NAMES}
    found: dict[str, Any] = {name: list(model.__dict__[name]) for name in CONTAINERS}
    found["kinds"] = [str(type(getattr(model, name))) for name in ("in_features", "forward")]
    found["parameters"] = [name for name, value in values.items() if isinstance(value, nn.Parameter)]
    found["plain"] = [name for name in model.__dict__ if name in NAMES]
    for name, value in values.items():
        tensor = isinstance(value, torch.Tensor)
        found[name] = value.detach().float().cpu() if tensor else str(value)
    return found


@pytest.mark.parametrize("budget", [None, "1GiB"], ids=["streamed", "resident"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_does_and_says_what_it_does_to_a_plain_module(
    provider: Provider, change: str, budget: str | None
) -> None:
    model, plain = with_table(), with_table()
    plain.load_state_dict(model.state_dict())
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    model(provider.randn(2, 4))
    assert said(CHANGES[change], model) == said(CHANGES[change], plain)
    testing.assert_bit_equal(contents(model), contents(plain))
    for name in NAMES:
        value = getattr(model, name, None)
        if isinstance(value, torch.Tensor) and name not in model.__dict__:
            assert (value.device, value.dtype) == (provider.device, torch.float64)
    del value
    handle.uninstall()
    testing.assert_bit_equal(contents(model), contents(plain), "after the uninstall")


def test_a_name_that_another_instance_of_the_class_has(provider: Provider) -> None:
    """A name that one module has an attribute for does not appear on others of its class.

    Installed modules of a class share a generated class, which has a descriptor for each name of a weight.
    """
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    model[0].extra = nn.Parameter(torch.ones(2))
    provider.pair(model)
    assert not any(hasattr(model[i], "extra") for i in range(1, 5))
    model[1].extra = 5
    model[2].extra = nn.Linear(4, 4)
    model[3].register_buffer("extra", torch.ones(3))
    assert model[0].extra.shape == (2,) and model[0].extra.dtype == torch.float64
    assert model[1].extra == 5 and model[1].__dict__["extra"] == 5
    assert isinstance(model[2].extra, nn.Linear) and "extra" in model[2]._modules
    assert model[3].extra.shape == (3,)
    assert not hasattr(model[4], "extra") and getattr(model[4], "extra", 7) == 7
    del model[1].extra, model[2].extra
    assert not hasattr(model[1], "extra") and not hasattr(model[2], "extra")
    with pytest.raises(AttributeError, match="extra"):
        del model[1].extra
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'extra'"):
        _ = model[4].extra


def test_parameter_lists(provider: Provider) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(4, 4) for _ in range(3)])
            self.dict = nn.ParameterDict({"scale": torch.randn(4), "shift": torch.randn(4)})
            self.nested = nn.ParameterList([nn.ParameterDict({"a": torch.randn(4)})])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for w in self.list:
                x = x @ w + self.nested[0]["a"]
            return x * self.dict["scale"] + self.dict.shift

    def change(m: Lists, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        m.list.append(nn.Parameter(to(torch.ones(4, 4))))
        m.list.extend([nn.Parameter(to(torch.full((4, 4), 2.0)))])
        m.list[0] = nn.Parameter(to(torch.eye(4)))
        m.dict["shift"] = nn.Parameter(to(torch.zeros(4)))
        m.dict["new"] = nn.Parameter(to(torch.ones(4)))
        m.dict.pop("new")
        m.dict.update({"other": nn.Parameter(to(torch.ones(4)))})

    def passed(m: Lists) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = provider.randn(2, 4).requires_grad_()
        y = m(x)
        y.sum().backward()
        return y.detach(), x.grad

    model = Lists()
    moved, _ = provider.pair(model)
    for _ in range(2):
        testing.assert_bit_equal(passed(model), passed(moved))
        change(model, lambda t: t)
        change(moved, lambda t: t.to(provider.device, torch.float64))
    testing.assert_bit_equal(passed(model), passed(moved))
    assert_gradients_as_moved(model, moved, close=True)
    assert len(model.list) == 7 and list(model.dict) == ["scale", "shift", "other"]
    for w in [*model.list, *model.dict.values(), model.list[-1], model.dict.get("scale")]:
        assert isinstance(w, nn.Parameter)
        assert (w.dtype, w.device) == (torch.float64, provider.device)
    del w
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in moved.named_parameters()]
    assert all(p.dtype == torch.float32 for p in model.parameters())


SLICES: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "list slice": lambda m: list(m.list[1:3]),
    "step": lambda m: list(m.list[::-2]),
    "dict copy": lambda m: list(m.dict.copy().values()),
    "dict union": lambda m: list((m.dict | nn.ParameterDict()).values()),
}


@pytest.mark.parametrize("part", SLICES)
def test_a_part_of_a_parameter_list_can_be_computed_with(provider: Provider, part: str) -> None:
    model = nn.Module()
    model.list = nn.ParameterList([torch.randn(4) for _ in range(4)])
    model.dict = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})
    moved, _ = provider.pair(model)
    x = provider.randn(4)
    outputs = []
    for m in (model, moved):
        y = x
        for w in SLICES[part](m):
            y = y * w
        outputs.append(y.detach())
        y.sum().backward()
    testing.assert_bit_equal(*outputs)
    for p, q in zip(model.parameters(), moved.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            testing.assert_bit_equal(p.grad, q.grad.to(p.device, p.dtype))
