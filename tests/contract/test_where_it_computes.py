"""`device` and `dtype` of an installed model are those of its compute, as libraries ask for them."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap.device_queries import CONSTANT_IN_GRAPHS
from sample_models import mlp

HOME = torch.device("cpu")


class Asked(nn.Module):
    """Has `device` and `dtype` properties that look at its parameters, as models of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.body = mlp()
        self.kept_on = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the first floating parameter."""
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.to(self.dtype)) + torch.ones(1, device=self.device, dtype=self.dtype)


class Loops(Asked):
    @property
    def device(self) -> torch.device:
        return self._first("device")

    @property
    def dtype(self) -> torch.dtype:
        return self._first("dtype")

    def _first(self, what: str) -> Any:
        for _, tensor in (*self.named_buffers(), *self.named_parameters()):
            if tensor.is_floating_point():
                return getattr(tensor, what)
        raise StopIteration


class ByName(Asked):
    @property
    def device(self) -> torch.device:
        return self.get_parameter("body.0.weight").device

    @property
    def dtype(self) -> torch.dtype:
        return self.body[0].weight.dtype


class OverAnother(Loops):
    @property
    def device(self) -> torch.device:
        return super().device

    @property
    def dtype(self) -> torch.dtype:
        return super().dtype


@pytest.mark.parametrize("cls", [Asked, Loops, ByName, OverAnother], ids=lambda c: c.__name__)
def test_properties_that_look_at_masters(provider: Provider, cls: type[Asked]) -> None:
    model = cls()
    moved, handle = provider.pair(model)
    assert (model.device, model.dtype) == (provider.device, torch.float64) == (moved.device, moved.dtype)
    x = provider.randn(3, 16, dtype=torch.float32)
    testing.assert_bit_equal(model(x), moved(x), "output")
    assert {(p.device, p.dtype) for p in model.parameters()} == {(HOME, torch.float32)}
    handle.uninstall()
    assert (model.device, model.dtype) == (HOME, torch.float32)


def test_without_a_cast_the_dtype_is_the_masters(provider: Provider) -> None:
    model = Asked().half()
    provider.install(model)
    assert (model.device, model.dtype) == (provider.device, torch.float16)
    model.bfloat16()
    assert model.dtype == torch.bfloat16


def test_a_property_that_means_something_else(provider: Provider) -> None:
    """A property `device` or `dtype` with another meaning keeps its value.

    This holds even if the value happens to be the masters' device, or if the property looks at parameters
    first.
    """

    class Other(nn.Linear):
        set_to: Any = None

        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def dtype(self) -> Any:
            any(p.requires_grad for p in self.parameters())
            return "as of last year"

        @dtype.setter
        def dtype(self, value: Any) -> None:
            self.set_to = value

        @dtype.deleter
        def dtype(self) -> None:
            self.set_to = "deleted"

    model = Other(4, 4)
    provider.pair(model)
    assert (model.device, model.dtype) == (torch.device("cpu"), "as of last year")
    model.dtype = torch.float16
    assert model.set_to == torch.float16
    del model.dtype
    assert model.set_to == "deleted"
    assert Other.dtype.__doc__ == type(model).dtype.__doc__


def test_a_property_that_raises(provider: Provider) -> None:
    class Empty(nn.Module):
        device = Asked.device

    model = Empty()
    provider.install(model)
    with pytest.raises(StopIteration):
        model.device  # noqa: B018
    assert next(mlp().parameters()).device == HOME


def test_a_part_that_is_not_installed_answers_for_itself(provider: Provider) -> None:
    model = Asked()
    provider.pair(model)
    dynswap_ext.uninstall(model.body[0])
    assert (model.device, model.dtype) == (HOME, torch.float32)  # its first parameter's
    dynswap_ext.uninstall(model)
    provider.install(model.body, dtype=torch.float64)
    assert (model.device, model.dtype) == (HOME, torch.float32)  # the model itself is plain


def test_asking_costs_no_fetch_and_no_flush(provider: Provider) -> None:
    model = Asked()
    _, handle = provider.pair(model)
    weight = model.body[0].weight
    handle.reset_stats()
    with torch.no_grad():
        weight.fill_(3)
        assert model.dtype == torch.float64
    assert handle.stats().bytes_moved == 0
    del weight
    testing.assert_bit_equal(next(iter(model.parameters())), torch.full((16, 16), 3.0).requires_grad_())


def test_a_programs_own_iteration_gets_masters(provider: Provider) -> None:
    model = mlp()
    masters = [model[0]._parameters["weight"], model[0]._parameters["bias"]]
    provider.pair(model)
    assert next(model.parameters()).device == HOME
    assert next(model.parameters()).dtype == torch.float32
    assert next(p.device for p in model.parameters()) == HOME
    assert [a is b for a, b in zip(model.parameters(), masters, strict=False)] == [True, True]


class Forward(nn.Module):
    """A program's own module, whose forward asks its parameters for device and dtype."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(16, 16), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device, dtype = getattr(self, self.way)()
        return self.layer(x.to(device, dtype))  # type: ignore[no-any-return]

    def at_once(self) -> tuple[torch.device, torch.dtype]:
        return next(self.parameters()).device, next(iter(self.layer.parameters())).dtype

    def by_name(self) -> tuple[torch.device, torch.dtype]:
        first = next(self.parameters())
        return first.device, first.dtype

    def in_a_loop(self) -> tuple[torch.device, torch.dtype]:
        for each in self.parameters():
            if each.dtype.is_floating_point:
                return each.device, each.dtype
        raise AssertionError

    def generated(self) -> tuple[torch.device, torch.dtype]:
        return next(p.device for p in self.parameters()), max((p.dtype for p in self.parameters()), key=str)

    def under_a_condition(self) -> tuple[torch.device, torch.dtype]:
        trainable = next(p.device for p in self.parameters() if p.requires_grad and p.ndim == 2)
        return trainable, next(p.dtype for p in self.parameters() if p.is_floating_point())

    def of_a_weight(self) -> tuple[torch.device, torch.dtype]:
        return self.layer.weight.device, self.layer.bias.dtype

    def masters(self) -> tuple[torch.device, torch.dtype]:
        """Use the parameters themselves, which are the masters, as outside a forward."""
        first = next(self.parameters())
        assert first is self.layer._parameters["weight"]
        assert [p for p in self.parameters() if p.device == HOME] == list(self.layer._parameters.values())
        assert (
            next(p.device for p in self.parameters() if p.data_ptr() and isinstance(p, nn.Parameter)) == HOME
        )
        return self.of_a_weight()


WAYS = ("at_once", "by_name", "in_a_loop", "generated", "under_a_condition", "of_a_weight", "masters")


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_asks_its_parameters(provider: Provider, way: str) -> None:
    model = Forward(way)
    moved, handle = provider.pair(model)
    x = torch.randn(2, 16, dtype=torch.float32)
    plain = moved.layer(x.to(provider.device, torch.float64))
    for _ in range(20):
        testing.assert_bit_equal(model(x), plain)
    stats, read = handle.stats(), 4 if way in ("of_a_weight", "masters") else 2
    assert stats.hits + stats.late_hits + stats.misses <= 20 * read  # to ask fetches nothing
    assert next(model.parameters()).dtype == torch.float32


LIBRARY = """
import itertools

def first(m):
    return next(m.parameters()).device, next(iter(m.parameters())).dtype

def chained(m):
    return next(itertools.chain(m.parameters(), m.buffers())).device, next(m.parameters()).dtype

def generated(m):
    dtype = next(x.dtype for x in m.parameters() if x.is_floating_point())
    return next(p.device for p in m.parameters()), dtype

def listed(m):
    return [next(k.parameters()).device for k in [m]][0], [next(k.parameters()).dtype for k in [m]][0]

def get_parameter_dtype(m):
    for name, p in m.named_parameters():
        if "norm" not in name and p.is_floating_point():
            return p.dtype

def get_parameter_device(m):
    for p in m.parameters():
        return p.device

def helpers(m):
    return get_parameter_device(m), get_parameter_dtype(m)

def masters(m):
    tensor = next(m.parameters())
    device = tensor.device
    on_it = (p for p in m.parameters() if p.device == device)
    return tensor, *on_it, *m.parameters(), next(iter(list(m.parameters())))
"""


@pytest.fixture
def library() -> Iterator[Any]:
    module: Any = types.ModuleType("diffusers.pipelines.made_up")
    exec(compile(LIBRARY, "made_up.py", "exec"), module.__dict__)
    yield module


@pytest.mark.parametrize("way", ["first", "chained", "generated", "listed", "helpers"])
def test_a_known_library_that_asks_parameters(provider: Provider, library: Any, way: str) -> None:
    model = mlp()
    provider.pair(model)
    for _ in range(20):  # Python replaces the instructions of code that runs often
        assert getattr(library, way)(model) == (provider.device, torch.float64)
    dynswap_ext.uninstall(model)
    assert getattr(library, way)(model) == (HOME, torch.float32)


def test_a_known_library_that_uses_parameters(provider: Provider, library: Any) -> None:
    model = mlp()
    masters = list(model.parameters())
    provider.pair(model)
    expected = [masters[0], *masters, *masters, masters[0]]
    assert [a is b for a, b in zip(library.masters(model), expected, strict=True)] == [True] * len(expected)


def test_a_property_that_keeps_its_answer(provider: Provider) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.kept: torch.dtype | None = None

        @property
        def dtype(self) -> torch.dtype:
            if self.kept is None:
                self.kept = next(self.parameters()).dtype
            return self.kept

    model = Keeps()
    with provider.install(model, dtype=torch.float64):
        assert [model.dtype, model.dtype] == [torch.float64, torch.float64]
    assert model.dtype == torch.float32
    with provider.install(model, dtype=torch.bfloat16):
        assert model.dtype == torch.float32, "nothing tells where that is from"


def test_compiled(provider: Provider) -> None:
    model = Asked()
    moved, _ = provider.pair(model)
    x = provider.randn(3, 16, dtype=torch.float32)
    if provider.device.type != "cpu":
        pytest.skip("the compiler knows no pretend device")
    compiled = torch.compile(model, backend="eager", fullgraph=provider.native and CONSTANT_IN_GRAPHS)
    with torch.no_grad():
        testing.assert_bit_equal(compiled(x), moved(x), "output")
        dynswap_ext.uninstall(model)
        assert compiled(x).dtype == torch.float32


def test_no_library_is_imported() -> None:
    names = ["transformers", "diffusers", "peft", "accelerate", "torch._dynamo"]
    code = (
        "import sys, dynswap_ext, torch; dynswap_ext.install(torch.nn.Linear(2, 2)); "
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
