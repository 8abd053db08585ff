"""The lock of a pure-Python session.

Note [Deaths are settled later]
-------------------------------
A handed-out tensor can die anywhere: in another thread, in the autograd engine, in a garbage collection
that an allocation of the session's own code set off. So the weak reference's callback only appends to a
deque, which needs no lock; whoever holds the lock settles what is in it on the way out, and the callback
tries to be that one without waiting.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

__all__ = ["Exclusive"]


class Exclusive:
    """A session's lock, which settles deaths when it is let go. See Note [Deaths are settled later].

    Reentrant, as a garbage collection may run user code that accesses a module while it is held.
    """

    __slots__ = ("_depth", "_lock", "_settle")

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = weakref.WeakMethod(settle)
        self.renew()

    def renew(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        settle = self._settle() if self._depth == 1 else None
        try:
            if settle is not None:
                settle()
        finally:
            self._depth -= 1
            self._lock.release()

    def settle_if_free(self) -> None:
        if self._depth == 0 and self._lock.acquire(blocking=False):
            self._depth += 1
            self.__exit__()
