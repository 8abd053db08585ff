"""The options `keep` and `ignore`: which weights stay on the device, and which are left alone."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from dynswap_ext._swap.state import is_scripted, modules_of, named_modules_of
from dynswap_ext._util.option_names import did_you_mean
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError


class Chosen(NamedTuple):
    """The weights that `keep` and `ignore` name in a list of modules, by a module's place in the list."""

    #: The modules that are left alone, because `ignore` names all weights in them.
    left_alone: set[int]
    #: The names of a module's own weights that stay on the device (`keep`) or are left alone (`ignore`).
    keep: dict[int, frozenset[str]]
    ignore: dict[int, frozenset[str]]


class _Named(NamedTuple):
    """The own weights of one module that the patterns of `keep` and `ignore` match."""

    module: weakref.ref[nn.Module]
    left_alone: bool
    keep: frozenset[str]
    ignore: frozenset[str]


class Choices:
    """Matches the patterns of `keep` and `ignore` to the weights of a tree. Keeps no module alive.

    A pattern is a name or a glob, as the shell has it: `*` stands for any characters, dots included. It
    matches a weight, or a module with all that is in it.
    """

    def __init__(self, keep: Sequence[str], ignore: Sequence[str]) -> None:
        self._patterns = {"keep": tuple(keep), "ignore": tuple(ignore)}
        #: By the id of a module. After its death another module may have the id, so `_named` compares.
        self._of: dict[int, _Named] = {}

    def survey(self, root: nn.Module) -> None:
        """Find the weights that the patterns name.

        Raises
        ------
        ConfigError
            A pattern matches no weight, `keep` and `ignore` name the same one, or `ignore` names all weights.
        """
        if not any(self._patterns.values()):
            return
        weights = [
            (id(master), f"{path}.{name}" if path else name)
            for path, module in named_modules_of(root)
            if not is_scripted(type(module))
            for name, master, _ in own_masters(module)
        ]
        names = [name for _, name in weights]
        # A master that several modules share is one weight, with several names.
        kept, alone = (
            {master: name for master, name in weights if name in matched}
            for matched in (self._matched("keep", names), self._matched("ignore", names))
        )
        if both := [master for master in kept if master in alone]:
            one, other = kept[both[0]], alone[both[0]]
            also = "" if one == other else f", which is also {other!r}"
            raise ConfigError(f"keep and ignore both name {one!r}{also}: a weight is kept, or left alone")
        if weights and len(alone) == len(dict(weights)):
            raise ConfigError("ignore names every weight: nothing is left to install")
        left = {id(module) for module in modules_of(root) if alone and _all_in(module, alone)}
        for module in modules_of(root):
            own = [] if is_scripted(type(module)) else own_masters(module)
            self._of[id(module)] = _Named(
                weakref.ref(module),
                id(module) in left,
                frozenset(name for name, master, _ in own if id(master) in kept),
                frozenset(name for name, master, _ in own if id(master) in alone),
            )

    def of(self, modules: Sequence[nn.Module]) -> Chosen:
        """Return what `keep` and `ignore` name in these modules."""
        chosen = Chosen(set(), {}, {})
        for place, module in enumerate(modules) if self._of else ():
            if (named := self._named(module)) is None:
                continue
            if named.left_alone:
                chosen.left_alone.add(place)
            if named.keep:
                chosen.keep[place] = named.keep
            if named.ignore:
                chosen.ignore[place] = named.ignore
        return chosen

    def ignores(self, module: nn.Module, name: str) -> bool:
        """Return whether `ignore` names the weight that the module has under this name."""
        named = self._named(module)
        return named is not None and name in named.ignore

    def _named(self, module: nn.Module) -> _Named | None:
        named = self._of.get(id(module))
        return named if named is not None and named.module() is module else None

    def _matched(self, option: str, names: Sequence[str]) -> set[str]:
        matched: set[str] = set()
        for pattern in self._patterns[option]:
            found = {name for name in names if any(fnmatchcase(path, pattern) for path in _paths(name))}
            if not found:
                known = dict.fromkeys(part for name in names for part in _paths(name))
                hint = did_you_mean(pattern, known)
                if not hint and names:
                    hint = f". Names are whole paths, such as {next(iter(names))!r}; '*' stands for any part"
                raise ConfigError(f"{option} has {pattern!r}, which matches no weight of the model{hint}")
            matched |= found
        return matched


def _paths(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a weight, then the weight's own: a, a.b, a.b.weight."""
    words = name.split(".")
    for end in range(1, len(words) + 1):
        yield ".".join(words[:end])


def _all_in(module: nn.Module, masters: Container[int]) -> bool:
    """Return whether a module and its children have weights, and the ids of all of them are in `masters`."""
    inside = [
        id(master)
        for part in modules_of(module)
        if not is_scripted(type(part))
        for _, master, _ in own_masters(part)
    ]
    return bool(inside) and all(master in masters for master in inside)
