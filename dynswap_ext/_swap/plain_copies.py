"""Makes copies and pickles of installed modules plain, with what was written on handed-out tensors."""

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
from dynswap_ext.lossless.tensor import LosslessTensor

_NEW_OBJECT: Final = (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
_RECONSTRUCT: Final = copyreg._reconstructor  # type: ignore[attr-defined]


def plain_reduction(module: Any, reduction: Any) -> Any:
    """Return an installed module's reduction, with its original class and without the install's state.

    `reduction` is what torch's or the user's `__reduce_ex__` has returned.
    """
    if not isinstance(reduction, tuple):
        return reduction
    swap = type(module)
    original = original_class(swap)
    function, arguments, *rest = reduction
    if arguments and arguments[0] is swap and function in _NEW_OBJECT:
        # Pickle requires these two functions to get the class of the object itself. So they are replaced, by
        # functions of Python, because a plain module's pickle may not need this package.
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
    """Return wrappers for the methods with which a class copies and pickles its instances, by name.

    They bring the masters of the module up to date with `flush`, and make the copy or pickle plain.
    """

    def wrapped(name: str, copier: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(copier)
        def copied(self: Any, *args: Any) -> Any:
            flush(self)
            # A GraphModule gives a copy the class of `self`, so `self` is a plain object here. Both share the
            # masters.
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
    """The state in an installed module's reduction, which calls `note_copy` for a deep copy of the module.

    It finds the copy in the memo, where `copy.deepcopy` puts it before it copies the state. A `__deepcopy__`
    on the swap class would do, too. But a wrapper that forwards attributes, such as peft's, would find it, so
    that a copy of the wrapper would be a copy of the module inside. It is pickled as a plain dictionary.
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
    """Make a replica of an installed module plain, and return it.

    The replica has the module's `__dict__` entries. The install's state among them is removed, and the class
    becomes the original. Anything else is returned as it is, and so is a replica that is installed itself.
    """
    if not isinstance(replica, nn.Module) or replica is module:
        return replica
    if vars(replica).get(STATE_KEY) in (None, vars(module).get(STATE_KEY)):  # else it is installed itself
        vars(replica).pop(STATE_KEY, None)
        set_class(replica, original_class(type(replica)))
    return replica


def is_part(master: torch.Tensor) -> bool:
    """Return whether a master is a part of something, which other masters may have parts of, too."""
    if isinstance(master, LosslessTensor):
        return master.nbytes != master._dynswap_content.nbytes
    if type(master) not in (torch.Tensor, nn.Parameter) or master.is_nested:
        return False
    return master.layout is torch.strided and master.nbytes != master.untyped_storage().nbytes()


def plain_state(state: Any) -> Any:
    """Return what `__getstate__` has returned for a module, without the entry that an install adds."""
    if isinstance(state, dict) and STATE_KEY in state:
        return {key: value for key, value in state.items() if key != STATE_KEY}
    return state
