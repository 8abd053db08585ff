"""Keeps track of the modules of one install, in the model or taken out of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from dynswap_ext._swap.state import modules_of, session_of

__all__ = ["ServedModules", "model_of", "note_joined"]

# Note [Modules outlive their container]: the list of ``install(nn.ModuleList([a, b]))`` may die at once while
# `a` and `b` live on, and a part may be taken out of its model. Such modules are still served, so the install
# goes on: its handle finds them, plans for them and gives them back. It keeps none of them alive.


class ServedModules:
    """Knows the modules that a session serves, by weak references.

    Parameters
    ----------
    root
        The installed model.
    session
        The session that serves it; not kept alive.
    when_gone
        Called once with the session, when the last of the modules has died. Not called after `forget`.
    """

    def __init__(self, root: nn.Module, session: Any, when_gone: Callable[[Any], object]) -> None:
        self._root = weakref.ref(root)
        self._session: Callable[[], Any] = weakref.ref(session)
        self._when_gone = when_gone
        #: Each module and its path, by id, in the order of definition. Of those that have died, the id may
        #: be another object's by now.
        self._known: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        #: How many were known after the first time, or the last time that dead ones were removed.
        self._size_when_pruned = 0
        self._note(root, "")
        self._watch(root)
        _of_session[session] = self

    def tree(self) -> nn.Module | None:
        """Return the model while it lives, then `rest`; None if nothing is served."""
        root = self._root()
        return self.rest() if root is None else root

    def rest(self) -> nn.Module | None:
        """Return all that is served, as children of a new module; None if nothing is served."""
        left: dict[str, nn.Module | None] = {}
        below: set[int] = set()
        for module, path in self._served():
            if id(module) not in below:  # parents come before their children
                below.update(map(id, modules_of(module)))
                left[path or "model"] = module
        if not left:
            return None
        rest = nn.Module()
        rest._modules = left
        return rest

    def everything(self) -> nn.Module | None:
        """Return the model if all that is served is in it, else `rest`; None if nothing is served."""
        root, rest = self._root(), self.rest()
        if root is None or rest is None:
            return rest
        below = set(map(id, modules_of(root)))
        return root if all(id(module) in below for module in rest._modules.values()) else rest

    def serving(self) -> bool:
        """Whether any module is served now."""
        return next(self._served(), None) is not None

    def joined(self, parent: nn.Module, child: nn.Module) -> None:
        """Note a child that has joined the install under one of its modules, with all that is in it."""
        known = self._known.get(id(parent))
        path = f"{known[1]}." if known is not None and known[0]() is parent and known[1] else ""
        name = next((name for name, module in reversed(parent._modules.items()) if module is child), "joined")
        if len(self._known) > 2 * self._size_when_pruned:
            self._known = {key: known for key, known in list(self._known.items()) if known[0]() is not None}
            self._size_when_pruned = len(self._known)
        self._note(child, path + name)

    def forget(self) -> None:
        """Forget all modules, as none is served any more. `when_gone` is not called."""
        self._watching.detach()
        self._known.clear()

    def _note(self, root: nn.Module, path: str) -> None:
        stack: list[tuple[nn.Module, str]] = [(root, path)]
        seen: set[int] = set()
        while stack:
            module, path = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            self._known.pop(id(module), None)  # a module that is noted again comes last
            self._known[id(module)] = weakref.ref(module), path
            if module._modules:
                prefix = f"{path}." if path else ""
                stack += [
                    (child, prefix + name)
                    for name, child in reversed(module._modules.items())
                    if child is not None
                ]
        self._size_when_pruned = self._size_when_pruned or len(self._known)

    def _served(self) -> Iterator[tuple[nn.Module, str]]:
        session = self._session()
        for ref, path in list(self._known.values()) if session is not None else ():
            module = ref()
            if module is not None and session_of(module) is session:
                yield module, path

    def _watch(self, module: nn.Module) -> None:
        self._watching = weakref.finalize(module, self._one_is_gone)
        self._watching.atexit = False

    def _one_is_gone(self) -> None:
        """Watch another module for its death, or call `when_gone` if none is served any more.

        It is the last one: a tree that is freed as a whole is freed in order, so no other has to be watched
        in between.
        """
        session = self._session()
        while self._known:
            key = next(reversed(self._known))
            module = self._known[key][0]()
            if module is not None and session is not None and session_of(module) is session:
                self._watch(module)
                return
            del self._known[key]
        if session is not None:
            self._when_gone(session)


#: By session, which its modules and its install keep alive.
_of_session: weakref.WeakKeyDictionary[Any, ServedModules] = weakref.WeakKeyDictionary()


def note_joined(session: Any, parent: nn.Module, child: nn.Module) -> None:
    """Tell a session's install of a module that has joined it; no effect if the install has ended."""
    served = _of_session.get(session)
    if served is not None:
        served.joined(parent, child)


def model_of(session: Any) -> nn.Module | None:
    """Return the model that a session serves, or what is left of it; None if its install has ended."""
    served = _of_session.get(session)
    return None if served is None else served.tree()
