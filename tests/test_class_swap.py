"""The swap class of an installed module: its names and type, when it is made, and what copies become."""

from __future__ import annotations

import abc
import copy
import functools
import gc
import inspect
import io
import operator
import pickle
import weakref
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._python.attribute import Attribute
from dynswap_ext._swap.class_swap import is_swap_class, swap_class
from dynswap_ext._swap.state import original_class
from sample_models import ConvNet, Recurrent, mlp

T = TypeVar("T")


class Documented(nn.Linear):
    """A class with a docstring."""


def test_it_bears_the_original_names() -> None:
    made = swap_class(Documented, Attribute)
    assert made is not None and made is not Documented and issubclass(made, Documented)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(made, name) == getattr(Documented, name)
    assert str(made) == str(Documented)
    assert inspect.signature(made) == inspect.signature(Documented)
    assert original_class(made) is Documented
    assert original_class(Documented) is Documented


def test_one_per_class_and_provider() -> None:
    class Other(Attribute):
        pass

    made = swap_class(Documented, Attribute)
    assert made is not None
    assert swap_class(Documented, Attribute) is made
    assert swap_class(made, Attribute) is made
    assert swap_class(Documented, Other) is not made
    assert swap_class(nn.Linear, Attribute) is not made


def test_the_cache_keeps_no_class_alive() -> None:
    class Meta(type):
        pass

    class Local(nn.Linear, metaclass=Meta):
        pass

    model = Local(2, 2)
    with dynswap_ext.install(model, provider="python", device="cpu"):
        pass
    watches = weakref.ref(Local), weakref.ref(Meta)
    del Local, Meta, model
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


def test_it_counts_as_its_original() -> None:
    class Other(Attribute):
        pass

    class Meta(type):
        """A metaclass whose classes are equal if their names are."""

        def __eq__(cls, other: object) -> bool:
            return isinstance(other, type) and cls.__name__ == other.__name__

        def __hash__(cls) -> int:
            return hash(cls.__name__)

    class ByName(nn.Linear, metaclass=Meta):
        pass

    class Abstract(nn.Linear, abc.ABC):
        pass

    for cls in (Documented, ByName, Abstract):
        made, others = swap_class(cls, Attribute), swap_class(cls, Other)
        assert made is not None and others is not None
        assert made == cls and cls == made and made == others and not operator.ne(made, cls)
        assert made is not cls and made is not others
        assert hash(made) == hash(cls) == hash(others)
        assert {cls: 1}[made] == {made: 1}[cls] == {others: 1}[made] == 1
        assert made in (nn.ReLU, cls) and made not in (nn.ReLU, nn.Linear)
        assert made != nn.Linear and made != cls.__name__ and len({made, cls, others, nn.Linear}) == 2
        assert weakref.WeakKeyDictionary({cls: 1})[made] == 1

        derived = type(cls)("Derived", (made,), {})
        assert derived == derived and derived != made and derived != cls and made != derived
        assert len({derived, made, cls}) == 2


def test_what_is_keyed_by_classes_knows_an_installed_module(provider: Provider) -> None:
    class Shape(abc.ABC):  # noqa: B024
        pass

    @functools.singledispatch
    def describe(module: object) -> str:
        return "unknown"

    @describe.register
    def _(module: nn.Linear) -> str:
        return "linear"

    Shape.register(nn.Linear)
    registry: dict[type, int] = {nn.Linear: 1}
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    plain = nn.Linear(4, 4)
    provider.install(model)
    assert registry[type(model[0])] == 1 and type(model[1]) not in registry
    assert operator.eq(type(model[0]), type(plain)) and type(model[0]) is not type(plain)
    assert describe(model[0]) == describe(plain) == "linear"
    assert isinstance(model[0], Shape) and not isinstance(model[1], Shape)


def test_what_is_an_instance_of_the_original_is_one_of_the_swap_class(provider: Provider) -> None:
    """`isinstance(new, type(old))` holds for a plain module and an installed one of the same class.

    Code that exchanges modules, or looks for its own kind, asks so.
    """

    class Wide(nn.Linear):
        pass

    class Abstract(nn.Linear, abc.ABC):
        pass

    class Concrete(Abstract):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Wide(4, 4), nn.ReLU(), Abstract(4, 4))
    provider.install(model)
    abstract = type(model[3])
    for cls in (abstract, Abstract):
        assert (
            isinstance(Concrete(4, 4), cls) and isinstance(Abstract(4, 4), cls) and isinstance(model[3], cls)
        )
        assert issubclass(Concrete, cls) and issubclass(abstract, cls)
        assert not isinstance(model[0], cls) and not issubclass(nn.ReLU, cls) and not issubclass(Wide, cls)
    linear, wide = type(model[0]), type(model[1])
    assert isinstance(nn.Linear(4, 4), linear) and issubclass(nn.Linear, linear)
    assert isinstance(model[1], linear) and issubclass(wide, linear) and isinstance(Wide(4, 4), linear)
    assert not isinstance(model[0], wide) and not issubclass(linear, wide)
    assert not isinstance(model[2], linear) and not isinstance(3, linear)
    derived = type("Derived", (linear,), {})
    assert isinstance(model[0], linear) and issubclass(derived, linear)
    assert not isinstance(model[0], derived) and not issubclass(nn.Linear, derived)


def test_a_module_that_is_given_another_class_stays_installed(provider: Provider) -> None:
    """An installed module may get a class that derives from its original, as patches do."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Shown(Doubled):
        @property
        def bias(self) -> torch.Tensor:  # type: ignore[override]
            return self._parameters["bias"].to(self.weight.device, self.weight.dtype)

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    moved, _ = provider.pair(model)
    x = provider.randn(2, 4)
    model(x)
    for cls in (Doubled, Shown, nn.Linear, Doubled):
        model[0].__class__ = moved[0].__class__ = cls
        assert operator.eq(type(model[0]), cls) and isinstance(model[0], cls)
        testing.assert_bit_equal(model(x), moved(x))
    dynswap_ext.uninstall(model)
    assert type(model[0]) is Doubled and "_dynswap" not in vars(model[0])
    model[0].__class__ = nn.Linear
    assert type(model[0]) is nn.Linear


def test_a_subclass_hook_is_not_run(provider: Provider) -> None:
    seen = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(key)

    class Child(Registered, key="child"):
        pass

    model = Child(4, 4)
    moved, _ = provider.pair(model)
    x = provider.randn(2, 4)
    testing.assert_bit_equal(model(x), moved(x))
    assert seen == ["child"]


def test_a_class_derived_from_a_swap_class_runs_the_hook(provider: Provider) -> None:
    seen = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    model = Registered(4, 4)
    provider.pair(model)

    class Derived(type(model)):  # type: ignore[misc]
        pass

    assert seen == ["Derived"]


def test_metaclasses_abstract_and_generic_classes(provider: Provider) -> None:
    class Meta(type):
        pass

    class WithMeta(nn.Linear, metaclass=Meta):
        pass

    class AbstractFirst(abc.ABC, nn.Linear):
        pass

    class AbstractLast(nn.Linear, abc.ABC):
        pass

    class GenericFirst(Generic[T], nn.Linear):
        pass

    class GenericLast(nn.Linear, Generic[T]):
        pass

    class Mixin:
        pass

    class MixinFirst(Mixin, nn.Linear):
        pass

    for cls in (WithMeta, AbstractFirst, AbstractLast, GenericFirst, GenericLast, MixinFirst):
        model = cls(4, 4)
        moved, handle = provider.pair(model)
        assert is_swap_class(type(model)), cls
        assert issubclass(type(type(model)), type(cls)) and str(type(type(model))) == str(type(cls))
        x = provider.randn(2, 4)
        testing.assert_bit_equal(model(x), moved(x))
        handle.uninstall()
        assert type(model) is cls


def test_a_class_that_cannot_be_derived_from_is_left_alone(provider: Provider) -> None:
    class Final(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("final")
            return super().__new__(mcs, name, bases, namespace)

    class Closed(nn.Linear, metaclass=Final):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Closed(4, 4))
    with pytest.warns(dynswap_ext.DynswapWarning, match="Closed"):
        provider.install(model, dtype=torch.float64)
    assert type(model[1]) is Closed
    assert model[1].weight.dtype == torch.float32
    assert model[0].weight.dtype == torch.float64


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_a_plain_module(provider: Provider, protocol: int) -> None:
    model = ConvNet()
    expected = model.state_dict()
    provider.pair(model)
    plain = pickle.dumps(testing.moved(model), protocol)
    pickled = pickle.dumps(model, protocol)
    assert b"dynswap" not in pickled
    assert len(pickled) < len(plain) + 1000
    loaded = pickle.loads(pickled)
    assert_plain(loaded)
    testing.assert_bit_equal(loaded.state_dict(), expected, "state")


def assert_plain(model: nn.Module) -> None:
    assert not any(is_swap_class(type(module)) for module in model.modules())
    assert not any("_dynswap" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("make", [ConvNet, mlp, Recurrent])
def test_copies_are_plain_modules(provider: Provider, make: Any) -> None:
    model = make()
    provider.pair(model)
    for copied in (copy.deepcopy(model), copy.copy(model)):
        assert not dynswap_ext.is_installed(copied)
        assert type(copied) is make or type(copied) is nn.Sequential
    assert_plain(copy.deepcopy(model))
    assert all(is_swap_class(type(module)) for module in model.modules())


def test_torch_save_of_the_whole_model(provider: Provider) -> None:
    model = mlp()
    provider.pair(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_plain(loaded)
    testing.assert_bit_equal(loaded.state_dict(), model.state_dict(), "state")


class WithArguments(nn.Linear):
    def __new__(cls, *args: Any, **kwargs: Any) -> WithArguments:
        made = super().__new__(cls)
        made.__dict__["made_with"] = args, kwargs
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.__dict__["made_with"]


def test_a_class_whose_new_takes_arguments(provider: Provider) -> None:
    model = WithArguments(4, out_features=3)
    provider.pair(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is WithArguments
        assert made.made_with == ((4,), {"out_features": 3})
        assert made.weight.dtype == torch.float32


def test_a_copy_of_the_dict_does_not_bring_the_install_along(provider: Provider) -> None:
    model = nn.Linear(4, 4)
    provider.pair(model)
    replica = type(model).__new__(type(model))  # like nn.parallel.replicate
    replica.__dict__ = model.__dict__.copy()
    replica._parameters = {"weight": torch.ones(4, 4), "bias": None}
    assert replica.weight is replica._parameters["weight"]
    assert replica.bias is None
    assert model.weight.dtype == torch.float64


def test_slices_of_containers_are_plain_containers(provider: Provider) -> None:
    model = mlp()
    provider.pair(model)
    modules = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    provider.pair(modules)
    assert type(model[:2]) is nn.Sequential
    assert type(modules[1:]) is nn.ModuleList
    assert model[:2][0] is model[0]
    assert type(type(model)(nn.ReLU())) is nn.Sequential
    assert is_swap_class(type(model))


def test_a_class_derived_while_installed_is_kept_by_the_uninstall(provider: Provider) -> None:
    model = nn.Linear(4, 4)
    provider.install(model, dtype=torch.float64)
    derived = type("Derived", (type(model),), {"extra": 1})  # like nn.utils.parametrize
    model.__class__ = derived
    assert model.weight.dtype == torch.float64
    dynswap_ext.uninstall(model)
    assert type(model) is derived
    assert not dynswap_ext.is_installed(model)
    assert "_dynswap" not in model.__dict__
    assert model.weight is model._parameters["weight"]
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_setattr_of_any_kind(provider: Provider) -> None:
    model = nn.Linear(4, 4)
    provider.pair(model)
    model.child = nn.ReLU()
    model.number = 5
    assert list(model._modules) == ["child"]
    assert model.__dict__["number"] == 5
    with pytest.raises(TypeError, match="cannot assign"):
        model.weight = torch.ones(4, 4)
    with pytest.raises(KeyError, match="already exists"):
        model.register_buffer("weight", torch.ones(1))
