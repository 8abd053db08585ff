"""Classes that `torch.nn.utils.parametrize` makes for one module, and installs.

Note [Over a parametrised class]
Torch derives a class from the module's own, for that module alone, and puts a property on it for each name
that is computed. Taking a parametrisation off deletes the property from ``type(module)`` and sets the
module's class to ``type(module).__bases__[0]``. So a swap class over such a class would get in torch's way.
Its swap class is a copy of it instead, over the swap class of its base: there torch finds what it expects,
and what it does leaves the module installed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from torch import nn

from dynswap_ext._swap.state import session_of

_COPY: Final = "_dynswap_copy"


def made_by_torch(cls: type) -> bool:
    """Whether torch made the class for a parametrised module."""
    refuses = getattr(cls.__dict__.get("__getstate__"), "__qualname__", "")
    return "_inject_new_class" in refuses and _COPY not in cls.__dict__


def is_copy(cls: type) -> bool:
    return _COPY in cls.__dict__


def copy_over(cls: type, name: str, base: type, namespace: dict[str, Any]) -> type:
    """Copy a class that torch made over the swap class of its base: Note [Over a parametrised class]."""
    own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    made: type = type(cls)(name, (base,), {**own, _COPY: True, **namespace})
    return made


def apply_to_originals(modules: Sequence[nn.Module], sessions: Collection[Any]) -> list[type]:
    """Do to the originals of swap classes what torch did to those while sessions served their modules.

    Return the classes that torch derived from swap classes meanwhile: `rebase_on_originals` is for them.
    """
    made: list[type] = []
    for module in modules if sessions else ():
        cls = type(module)
        if session_of(module) not in sessions:
            continue
        if is_copy(cls):
            original, now = cls.__dict__["_dynswap_original"], _properties(cls)
            for name in _properties(original).keys() - vars(cls).keys():
                delattr(original, name)
            for name in now.keys() - vars(original).keys():
                setattr(original, name, now[name])
        elif made_by_torch(cls):
            made.append(cls)
    return made


def rebase_on_originals(classes: list[type]) -> None:
    """Give classes that torch derived from swap classes the originals as bases instead."""
    for cls in classes:
        base = cls.__bases__[0]
        cls.__bases__ = (base.__dict__.get("_dynswap_original", base),)


def _properties(cls: type) -> dict[str, property]:
    return {name: value for name, value in vars(cls).items() if isinstance(value, property)}
