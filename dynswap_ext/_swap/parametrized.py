"""Serves the classes that `torch.nn.utils.parametrize` makes for one module each.

Note [Over a parametrised class]
Torch derives a class from the module's own, for that module alone, and puts a property on it for each name
that is computed. To remove a parametrisation, torch deletes the property from ``type(module)``, and with the
last one sets the module's class to ``type(module).__bases__[0]``. On a swap class that is derived from such a
class, neither would do what torch means. So the swap class is a copy of torch's class, over the swap class of
its base. There torch finds what it expects, and the module stays installed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from torch import nn

from dynswap_ext._swap.state import session_of

_COPY: Final = "_dynswap_copy"


def made_by_torch(cls: type) -> bool:
    """Return whether torch made the class for a parametrised module. A copy of it does not count."""
    refuses = getattr(cls.__dict__.get("__getstate__"), "__qualname__", "")
    return "_inject_new_class" in refuses and _COPY not in cls.__dict__


def is_copy(cls: type) -> bool:
    """Return whether the class is a swap class that `copy_over` made."""
    return _COPY in cls.__dict__


def copy_over(cls: type, name: str, base: type, namespace: dict[str, Any]) -> type:
    """Return the swap class of a class that torch made: a copy, over the swap class `base` of its base.

    See Note [Over a parametrised class]. `namespace` is added to the copy.
    """
    own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    made: type = type(cls)(name, (base,), {**own, _COPY: True, **namespace})
    return made


def apply_to_originals(modules: Sequence[nn.Module], sessions: Collection[Any]) -> list[type]:
    """Repeat on original classes what torch has done on their swap classes: add and remove properties.

    That is done for modules that the sessions serve, in which names were parametrised meanwhile. Returns the
    classes that torch has derived from swap classes, for `rebase_on_originals`.
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
    """Replace the swap class from which each of these classes is derived by its original."""
    for cls in classes:
        base = cls.__bases__[0]
        cls.__bases__ = (base.__dict__.get("_dynswap_original", base),)


def _properties(cls: type) -> dict[str, property]:
    return {name: value for name, value in vars(cls).items() if isinstance(value, property)}
