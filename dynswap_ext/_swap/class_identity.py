"""A swap class counts as its original wherever classes are compared.

Note [A swap class equals its original]
Libraries look up what they know of a module by its class: ``registry[type(module)]``, ``type(a) == type(b)``,
``type(module) in classes``. A swap class has its original's methods, so what is known of those holds for it.
It equals its original, and has its hash; all swap classes of one original are equal, and what is an instance
of the original is one of theirs. ``type(module) is cls`` tells them apart, and so do pickles and code that
compares addresses, as torch.compile's guards do. A class that is derived from a swap class is one of its own.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from dynswap_ext._swap.state import original_class

#: By the metaclass of the original. Weak, as each holds its key.
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

        # By the order of bases alone: an ABC asks its subclasses, of which a swap class is one.

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
