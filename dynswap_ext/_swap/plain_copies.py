"""Copies and pickles of installed modules: plain ones, with what was written on handed-out tensors."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.casting import note_copy
from dynswap_ext._swap.state import STATE_KEY, as_plain, original_class, set_class

_NEW_OBJECT: Final = (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
_RECONSTRUCT: Final = copyreg._reconstructor  # type: ignore[attr-defined]


def plain_reduction(module: Any, reduction: Any) -> Any:
    """Return a reduction with the original class in place of the swap class, and without the state."""
    if not isinstance(reduction, tuple):
        return reduction
    swap = type(module)
    original = original_class(swap)
    function, arguments, *rest = reduction
    if arguments and arguments[0] is swap and function in _NEW_OBJECT:
        # Pickle wants the object's own class in these two; nor may a plain module's pickle need this package.
        positional, keywords = (arguments[1:], {}) if function is _NEW_OBJECT[0] else arguments[1:]
        if positional or keywords:
            function, arguments = functools.partial(original.__new__, original, *positional, **keywords), ()
        else:
            function, arguments = _RECONSTRUCT, (original, object, None)
    else:
        function = original if function is swap else function
        arguments = tuple(original if one is swap else plain_state(one) for one in arguments)
    if rest:
        state = plain_state(rest[0])
        rest[0] = _StateToCopy(state, module) if type(state) is dict else state
    return (function, arguments, *rest)


def copiers_for(cls: type, flush: Callable[[Any], None]) -> dict[str, Any]:
    """Wrap what a class defines for its copies and pickles; `flush` brings a module's masters up to date."""

    def wrapped(name: str, copier: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(copier)
        def copied(self: Any, *args: Any) -> Any:
            flush(self)
            # A GraphModule gives its copy its own class. What is copied shares the masters.
            like_plain = name == "__copy__" and isinstance(self, torch.fx.GraphModule)
            made = plain(self, copier(as_plain(self) if like_plain else self, *args))
            note_copy(self, made)
            return made

        return copied

    made = {"__copy__": made_plain, "__deepcopy__": made_plain, "__reduce_package__": plain_reduction}
    own = {name: inspect.getattr_static(cls, name, None) for name in made}
    return {
        name: wrapped(name, method, made[name]) for name, method in own.items() if inspect.isfunction(method)
    }


class _StateToCopy(dict[str, Any]):
    """The state of an installed module in its reduction, by which a copy of the module is noted.

    A `__deepcopy__` on the swap class would do that, too, but a wrapper that forwards attributes, as peft's
    do, would have it: a copy of the wrapper would be one of the module inside. `copy.deepcopy` puts the copy
    into the memo before it copies the state. Pickled, it is a plain dictionary.
    """

    def __init__(self, state: dict[str, Any], module: Any) -> None:
        super().__init__(state)
        self._module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        note_copy(self._module, memo.get(id(self._module)))
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def made_plain(module: Any, replica: Any) -> Any:
    """Give a replica of an installed module, which has its attributes, the original class."""
    if not isinstance(replica, nn.Module) or replica is module:
        return replica
    if vars(replica).get(STATE_KEY) in (None, vars(module).get(STATE_KEY)):  # else it is installed itself
        vars(replica).pop(STATE_KEY, None)
        set_class(replica, original_class(type(replica)))
    return replica


def plain_state(state: Any) -> Any:
    """Return a pickled state without what an install adds."""
    if isinstance(state, dict) and STATE_KEY in state:
        return {key: value for key, value in state.items() if key != STATE_KEY}
    return state
