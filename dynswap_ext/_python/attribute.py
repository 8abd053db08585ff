"""What stands on a swap class and in an installed module's `__dict__` (pure-Python provider)."""

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
    """What an installed module carries in its `__dict__`."""

    def __init__(
        self,
        session: Any,
        module: nn.Module,
        destinations: dict[str, Destination],
        ignored: frozenset[str] | None,
    ) -> None:
        self.session = session
        #: By the names that masters had at the install, and those that have been adopted since.
        self.destinations = destinations
        #: A copy of the module's `__dict__` brings the state along, but not the module.
        self.owner = weakref.ref(module)
        #: Names of masters that are left alone.
        self.ignored = ignored or frozenset()
        self.weights: dict[str, Weight] = session.weights_of(module, self)
        #: Those of the tensors inside wrappers, by the wrapper's name and theirs.
        self.inner: dict[str, dict[str, Weight]] = {}
        #: Masters that have taken a planned one's place, and in which call of the model they did.
        self.stand_ins: dict[str, tuple[Weight, int]] = {}

    def is_of(self, module: nn.Module) -> bool:
        """Whether the state is this module's, or that of another object with this very `__dict__`.

        torch.export has one for a module of two names.
        """
        owner = self.owner()
        return owner is module or (owner is not None and owner.__dict__ is module.__dict__)

    def in_effect(self) -> bool:
        """Whether the session still serves the state's module, and through this state."""
        module = self.owner()
        return module is not None and module.__dict__.get(STATE_KEY) is self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or unpickled state is none


class Attribute(property):
    """Data descriptor that serves one parameter or buffer name of installed modules.

    A property, whose getter torch.compile traces in place of `__get__`, as the native one is.
    """

    #: What a swap class needs beside its descriptors.
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
    """Read an attribute again: another thread is installing the module with another provider.

    It is between the class and the state, and needs this moment to go on.
    """
    time.sleep(0)
    return getattr(module, name)


def _place_of(module: nn.Module, name: str, master: torch.Tensor) -> tuple[torch.device, torch.dtype] | None:
    """On which device, and in which dtype, a module is served its master of this name; None: as it is."""
    state = module.__dict__.get(STATE_KEY)
    if state is None or name in state.ignored or not state.is_of(module):
        return None
    destination = state.session.destination_of(state, name)
    return None if destination.holds(master) else (destination.device, destination.dtype_for(master))
