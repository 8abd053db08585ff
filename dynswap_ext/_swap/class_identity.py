"""Makes a swap class count as its original class wherever classes are compared.

Note [A swap class equals its original]
Libraries look up facts about a module by its class: ``registry[type(module)]``, ``type(a) == type(b)``,
``type(module) in classes``. A swap class inherits the methods of its original, so the facts hold for it too.
Therefore a swap class equals its original and has the same hash. All swap classes of one original are equal,
and an instance of the original is an instance of each of them. ``type(module) is cls`` still tells them
apart, and so do pickle and code that compares addresses, such as the guards of torch.compile. A class that is
derived from a swap class equals neither.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from dynswap_ext._swap.state import original_class

#: Metaclasses of swap classes, by the metaclass of their originals. A value is derived from its key, so a
#: strong reference to the value would keep the key alive.
_metaclasses: Final[weakref.WeakKeyDictionary[type, weakref.ref[type]]] = weakref.WeakKeyDictionary()


def metaclass_over(metaclass: type) -> type:
    """Return the metaclass of swap classes, given that of their originals."""
    if "_dynswap_metaclass" in vars(metaclass):  # the original was derived from a swap class
        return metaclass
    known = _metaclasses.get(metaclass)
    made = None if known is None else known()
    if made is None:
        made = _make(metaclass)
        _metaclasses[metaclass] = weakref.ref(made)
    return made


def _make(metaclass: Any) -> type:
    class OfSwapClasses(metaclass):  # type: ignore[misc]
        _dynswap_metaclass = True

        def __eq__(cls, other: object) -> Any:
            if cls is other:
                return True
            ours, theirs = original_class(cls), original_class(other) if isinstance(other, type) else other
            return super().__eq__(other) if ours is cls and theirs is other else ours == theirs

        def __hash__(cls) -> int:
            original = original_class(cls)
            return super().__hash__() if original is cls else hash(original)

        # The checks of `type` look at the bases alone. Those of an ABC would ask the subclasses of the
        # original, among them the swap class, and so come back here.

        def __instancecheck__(cls, instance: Any) -> Any:
            original = original_class(cls)
            known = original is not cls and type.__instancecheck__(original, instance)
            return known or super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> Any:
            original = original_class(cls)
            known = original is not cls and type.__subclasscheck__(original, subclass)
            return known or super().__subclasscheck__(subclass)

    OfSwapClasses.__name__, OfSwapClasses.__qualname__ = metaclass.__name__, metaclass.__qualname__
    OfSwapClasses.__module__ = metaclass.__module__
    return OfSwapClasses
