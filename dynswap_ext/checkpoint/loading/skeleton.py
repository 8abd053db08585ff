"""Makes models without weights on the meta device, and later their tensors that no checkpoint has."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dynswap_ext._util.listing import listed
from dynswap_ext.errors import ConfigError

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Factory = Callable[[], nn.Module]

#: The factory of each module that `init_empty` has made. The keys are ids, as a class that defines equality
#: may have no hash. An attribute of the module would be seen by others.
_factories: dict[int, tuple[weakref.ref[nn.Module], Factory]] = {}


def init_empty(factory: Callable[[], ModuleT]) -> ModuleT:
    """Make a model's skeleton: modules, names, shapes and dtypes, and no memory for weights.

    Parameters
    ----------
    factory
        A callable without arguments that makes the model. It runs under ``torch.device("meta")``, where
        functions that initialise weights do nothing. A tensor that it makes with an explicit ``device="cpu"``
        is a real one. `load` may call it once more, to make tensors that no checkpoint holds.

    Returns
    -------
    torch.nn.Module
        The module, with parameters and buffers on the meta device. You can build an optimizer over its
        parameters before you load it.

    Raises
    ------
    ConfigError
        The factory is not callable, or does not return a module.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(
            "init_empty() takes a callable that makes a torch.nn.Module, as in "
            f"init_empty(lambda: Model(config)), not a {type(factory).__name__}"
        )
    model = make_skeleton(factory)
    key = id(model)
    _factories[key] = (weakref.ref(model, lambda _: _factories.pop(key, None)), factory)
    return model


def factory_of(model: nn.Module) -> Factory | None:
    """Return the factory from which `init_empty` has made a module; None for any other module."""
    reference, factory = _factories.get(id(model), (None, None))
    return factory if reference is not None and reference() is model else None


def make_skeleton(factory: Callable[[], ModuleT]) -> ModuleT:
    """Call the factory on the meta device, and return its model. Nothing is initialised."""
    with torch.device("meta"), _NoInitialisation():
        model = factory()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model factory returned a {type(model).__name__}, not a torch.nn.Module")
    return model


class _NoInitialisation(TorchFunctionMode):
    """Skips functions that fill a tensor on the meta device. Torch would run them in Python, for nothing."""

    _FILLS = frozenset(
        [getattr(nn.init, name) for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
        + [
            getattr(torch.Tensor, name)
            for name in ("bernoulli_", "erfinv_", "exponential_", "fill_", "normal_", "uniform_", "zero_")
        ]
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        filled = args[0] if args else (kwargs or {}).get("tensor")
        if func in self._FILLS and isinstance(filled, torch.Tensor) and filled.is_meta:
            return filled
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make a context in which parameters are freed, and become meta tensors, as soon as they are registered.

    Affects only modules that are made in this thread.
    """
    thread = threading.get_ident()
    seen: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id, which the reference keeps taken

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        if id(parameter) not in seen:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            seen[id(parameter)] = (parameter, empty)
        return seen[id(parameter)][1]

    # Torch annotates the hook as returning None; what it returns replaces the parameter.
    registration = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        registration.remove()


#: Types of most attributes that are no tensors. They are looked up first, as `isinstance` is slow here.
_NO_TENSORS = frozenset([type(None), bool, int, float, str, dict, OrderedDict, set, list, tuple])


def fill_unsaved(
    model: nn.Module, factory: Callable[[], nn.Module] | None, *, saved: Collection[str]
) -> None:
    """Give a loaded skeleton the values that no state dict holds, by calling the factory again.

    They are non-persistent buffers, and tensors that a module keeps as plain attributes. `saved` has the
    names in the state dict. Raises ConfigError if the factory is None, or makes no values.
    """
    lost = {
        name: (members, key)
        for name, members, key in _tensors(model)
        if members[key].is_meta and name not in saved
    }
    if not lost:
        return
    if factory is None:
        raise ConfigError(
            f"the skeleton is on the meta device and no checkpoint holds {listed([*lost], 10)} "
            "(non-persistent buffers, or tensors kept as plain attributes); give load() what makes the model "
            "instead of the model, as in load(lambda: Model(config), path), or make the skeleton with "
            "init_empty(lambda: Model(config)), and they are made again"
        )
    with _parameters_on_meta(), _NoInitialisation():
        twin = factory()
    made = {name: members[key] for name, members, key in _tensors(twin, remove_duplicate=False)}
    for name in lost:
        if name not in made or made[name].is_meta:
            raise ConfigError(
                f"no checkpoint holds {listed([*lost], 10)}, and calling the factory again made no value for "
                f"{name}; make it on the CPU explicitly (device='cpu') or register it as a persistent buffer"
            )
    for name, (members, key) in lost.items():
        members[key] = made[name]


def _tensors(model: nn.Module, **options: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield for each buffer, and each plain attribute that is a tensor: its name, and its dict and key."""
    for prefix, module in model.named_modules(**options):
        for members in (module._buffers, vars(module)):
            for key, value in members.items():
                if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor):
                    yield f"{prefix}.{key}" if prefix else key, members, key
