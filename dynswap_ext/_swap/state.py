"""The state that an installed module carries, its classes, and walks through trees of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

import torch
from torch import nn

from dynswap_ext._util.own_masters import own_masters

#: Where an installed module keeps its per-module state, in its own `__dict__`.
STATE_KEY: Final = "_dynswap"

#: Sets an object's class even where its class has a `__setattr__` or a `__class__` of its own in the way.
set_class: Final[Callable[[object, type], None]] = object.__dict__["__class__"].__set__


def original_class(cls: type) -> type:
    """Return the class that a swap class stands for; any other class is its own original."""
    return cast(type, cls.__dict__.get("_dynswap_original", cls))


def as_plain(module: nn.Module) -> Any:
    """Return an object of a module's original class that has the module's own ``__dict__``.

    It is for torch's code that looks at the type of `self`. What the code does to the object happens to the
    module. What it does to the class happens to the original class. The weights that it reads are masters.
    """
    plain: Any = object.__new__(original_class(type(module)))
    object.__setattr__(plain, "__dict__", module.__dict__)
    return plain


def session_of(module: nn.Module) -> Any:
    """Return the session that serves a module; None if the module is not installed."""
    return getattr(module.__dict__.get(STATE_KEY), "session", None)


def served_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of the modules that a session serves."""
    return [module for module in modules if STATE_KEY in module.__dict__ and session_of(module) is not None]


def sessions_of(modules: Iterable[nn.Module]) -> set[Any]:
    """Return the sessions that serve some of these modules."""
    return {session_of(module) for module in served_of(modules)}


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return every module of a tree once, parents before children, in the order of definition.

    Modules in a TorchScript module are left out, because its attributes live in C++.
    """
    found: dict[int, nn.Module] = {}
    stack: list[nn.Module | None] = [root]
    while stack:
        module = stack.pop()
        if module is None or (key := id(module)) in found:
            continue
        found[key] = module
        if (children := module._modules) and not is_scripted(type(module)):
            stack.extend(list(children.values())[::-1])  # in one step: other threads may change them
    return list(found.values())


def named_modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of a tree once, with its path, as `root.named_modules()` does.

    It is safe while other threads add and remove modules, because a module's children are listed in one step.
    """
    found: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        path, module = stack.pop()
        if id(module) in found:
            continue
        found.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        children = list(module._modules.items())
        stack.extend((prefix + name, child) for name, child in reversed(children) if child is not None)


def is_scripted(cls: type) -> bool:
    return issubclass(cls, torch.jit.ScriptModule)


def name_in(root: nn.Module, master: torch.Tensor) -> str:
    """Return the name of a master in a tree, for messages; if it has left the tree, a phrase that says so."""
    for path, module in named_modules_of(root):
        for name, other, _ in own_masters(module):
            if other is master:
                return f"{path}.{name}" if path else name
    return "a weight that has left the model"
