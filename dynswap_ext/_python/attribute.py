"""Descriptors of swap classes, and the state in an installed module's `__dict__` (pure-Python provider)."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import nn

from dynswap_ext._python.calls import namespace_for
from dynswap_ext._python.destination import Destination
from dynswap_ext._python.device_copy import Weight
from dynswap_ext._swap.compile_support import getter
from dynswap_ext._swap.state import STATE_KEY
from dynswap_ext._util.untraced import untraced


class ModuleState:
    """The state of an installed module, in its `__dict__`: the session, and how its masters are served."""

    def __init__(
        self,
        session: Any,
        module: nn.Module,
        destinations: dict[str, Destination],
        ignored: frozenset[str] | None,
    ) -> None:
        self.session = session
        #: By the names of masters, at the install and of those that were adopted later.
        self.destinations = destinations
        #: The module. It tells whether the state is in a copy of the module's `__dict__`.
        self.owner = weakref.ref(module)
        #: Names of masters that are handed out as they are.
        self.ignored = ignored or frozenset()
        self.weights: dict[str, Weight] = session.weights_of(module, self)
        #: The weights of tensors inside wrapper subclasses, by the wrapper's name and then their own.
        self.inner: dict[str, dict[str, Weight]] = {}
        #: Weights of masters that have replaced a planned one, with the number of the call when they did.
        self.stand_ins: dict[str, tuple[Weight, int]] = {}

    def is_of(self, module: nn.Module) -> bool:
        """Return whether the state belongs to a module, or to an object that shares the module's `__dict__`.

        torch.export makes such an object for a module with two names.
        """
        owner = self.owner()
        return owner is module or (owner is not None and owner.__dict__ is module.__dict__)

    def in_effect(self) -> bool:
        """Return whether the module is alive and still served through this state."""
        module = self.owner()
        return module is not None and module.__dict__.get(STATE_KEY) is self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy or pickle of a module is plain: it has None for the state


class Attribute(property):
    """A data descriptor that serves one parameter or buffer name of installed modules.

    It is a property, as in the native provider, because torch.compile traces a property's getter, and not
    its `__get__`.
    """

    #: Returns the other attributes that a swap class needs.
    namespace_for = staticmethod(namespace_for)

    def __init__(self, name: str, _: object) -> None:
        super().__init__(getter(name, _place_of))
        self._name = name

    @untraced
    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self
        name, held = self._name, module.__dict__
        if name in held:
            return held[name]
        parameters = held.get("_parameters") or {}
        is_param = name in parameters
        try:
            master = parameters[name] if is_param else held["_buffers"][name]
        except KeyError:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'") from None
        state = held.get(STATE_KEY)
        if type(state) is not ModuleState:
            return master if state is None else _under_another_provider(module, name)
        if (
            master is None
            or name in state.ignored
            or (state.owner() is not module and not state.is_of(module))
        ):
            return master
        training = not is_param and module.training
        return state.session.hand_out(state, name, master, training=training)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        try:
            del module.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


def _under_another_provider(module: nn.Module, name: str) -> Any:
    """Read an attribute again, because another thread is installing the module with another provider.

    That thread has set the class and not yet the state. The sleep lets it go on.
    """
    time.sleep(0)
    return getattr(module, name)


def _place_of(module: nn.Module, name: str, master: torch.Tensor) -> tuple[torch.device, torch.dtype] | None:
    """Return the device and the dtype in which a master is handed out; None if it is handed out as it is."""
    state = module.__dict__.get(STATE_KEY)
    if state is None or name in state.ignored or not state.is_of(module):
        return None
    destination = state.session.destination_of(state, name)
    return None if destination.holds(master) else (destination.device, destination.dtype_for(master))
