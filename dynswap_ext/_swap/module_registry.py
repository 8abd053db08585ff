"""Keeps track of the modules that each install serves, also of those that were taken out of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dynswap_ext._swap.choices import Choices
from dynswap_ext._swap.models import Models, models_in
from dynswap_ext._swap.protocol import Session
from dynswap_ext._swap.state import modules_of, session_of
from dynswap_ext._util.own_masters import own_masters

# Note [Modules outlive their container]: the list of ``install([a, b])`` may die at once while `a` and `b`
# live on, and a part may be taken out of its model. Such modules are still served, so the install goes on:
# its handle finds them, plans for them and can uninstall them. It keeps none of them alive.


class ServedModules:
    """Knows by weak references the modules that a session serves, and which of their weights are ignored."""

    session: Session

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._watching: weakref.finalize[..., nn.Module] | None = None
        self._root: Callable[[], nn.Module | None] = lambda: None
        #: The modules by id, parents first. If one has died, its id may be that of another object by now.
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        #: If several models were installed together: the name of each, by its id, and for each module, by the
        #: module's id, the name of the model that it is in.
        self._names: dict[int, str] = {}
        self._model_of: dict[int, str] = {}

    def serve(self, root: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Note the modules of a tree that the session is about to serve."""
        self._root = weakref.ref(root)
        self._note(modules)
        if isinstance(root, Models):
            for name, model in models_in(root).items():
                self._names[id(model)] = name
                for module in modules_of(model):
                    self._model_of.setdefault(id(module), name)
        #: How many modules were known at first, or when dead ones were removed last.
        self._size_when_pruned = len(self._known)
        self._watch(root)
        served_by[self.session] = self

    def tree(self) -> nn.Module | None:
        """Return the model. Once it has died, return `rest()`: its modules that are still served, or None."""
        root = self._root()
        return self.rest() if root is None else root

    def rest(self) -> nn.Module | None:
        """Return all modules that are served, in trees under a new module; None if none is served.

        Models that were installed together keep their names there.
        """
        left: list[nn.Module] = []
        below: set[int] = set()
        for module in self._served():
            if id(module) not in below:  # parents come before their children
                below.update(map(id, modules_of(module)))
                left.append(module)
        named: dict[str, nn.Module] = {}
        for place, module in enumerate(left):
            name = self._names.get(id(module), str(place))
            named[f"{name}_{place}" if name in named else name] = module
        return Models(named) if left else None

    def everything(self) -> nn.Module | None:
        """Return the model if all served modules are in it, else `rest()`; None if no module is served."""
        root, rest = self._root(), self.rest()
        if root is None or rest is None:
            return rest
        below = set(map(id, modules_of(root)))
        return root if all(id(module) in below for module in rest.children()) else rest

    def several(self) -> bool:
        """Return whether several models were installed together."""
        return len(self._names) > 1

    def model_with(self, module: nn.Module) -> str:
        """Return the name of the model that the module was in at the install; empty if there was only one."""
        return self._model_of.get(id(module), "")

    def serving(self) -> bool:
        return next(self._served(), None) is not None

    def joined(self, child: nn.Module) -> None:
        """Note a module that has joined the install, and all modules in it."""
        if len(self._known) > 2 * self._size_when_pruned:
            self._known = {key: known for key, known in list(self._known.items()) if known() is not None}
            self._size_when_pruned = len(self._known)
        self._note(modules_of(child))

    def masters(self) -> Iterator[torch.Tensor]:
        """Yield the masters that the served modules have now; tied ones come more than once."""
        for module in self._served():
            yield from (master for _, master, _ in own_masters(module))

    def ignores(self, module: nn.Module, name: str) -> bool:
        """Return whether the option `ignore` names the weight that the module has under this name."""
        return self._choices.ignores(module, name)

    def forget(self) -> None:
        """Forget all modules, none of which is served any more, and the sessions that have served them."""
        for session in [session for session, served in list(served_by.items()) if served is self]:
            del served_by[session]
        if self._watching is not None:
            self._watching.detach()
        self._known.clear()

    def _note(self, modules: Sequence[nn.Module]) -> None:
        noted = {id(module): weakref.ref(module) for module in modules}
        for key in self._known.keys() & noted.keys():
            del self._known[key]  # a module that is noted again comes last
        self._known.update(noted)

    def _served(self) -> Iterator[nn.Module]:
        for known in list(self._known.values()):
            module = known()
            if module is not None and session_of(module) is self.session:
                yield module

    def _watch(self, module: nn.Module) -> None:
        if self._watching is not None:
            self._watching.detach()
        self._watching = weakref.finalize(module, self._one_is_gone)
        self._watching.atexit = False

    def _one_is_gone(self) -> None:
        """Watch the last module that is served for its death, or forget the session if none is served.

        This is called when the module that was watched has died. A tree that is freed as a whole is freed in
        order, so its last module is the only one that is watched after its root.
        """
        while self._known:
            key = next(reversed(self._known))
            module = self._known[key]()
            if module is not None and session_of(module) is self.session:
                self._watch(module)
                return
            del self._known[key]
        served_by.pop(self.session, None)


#: The modules of each session's install. An entry is removed when the install ends, or with its last module.
served_by: dict[Session, ServedModules] = {}


def note_joined(session: Any, child: nn.Module) -> None:
    """Tell the install of a session that a module has joined it; no effect if the install has ended."""
    served = served_by.get(session)
    if served is not None:
        served.joined(child)


def serves_any(session: Any) -> bool:
    served = served_by.get(session)
    return served is not None and served.serving()


def model_of(session: Any) -> nn.Module | None:
    """Return the model of a session, or a tree of what is left of it; None if the install has ended."""
    served = served_by.get(session)
    return None if served is None else served.tree()


def masters_of(session: Any) -> Iterable[torch.Tensor]:
    """Return the masters that the modules of a session have now; none if the install has ended."""
    served = served_by.get(session)
    return () if served is None else served.masters()
