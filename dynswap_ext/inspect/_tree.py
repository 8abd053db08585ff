"""The modules of a model with their paths; shared by everything here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from dynswap_ext._swap.class_swap import original_class
from dynswap_ext._swap.state import is_scripted
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import ConfigError

__all__ = ["Node", "class_name", "entries", "root_of", "walk"]


@dataclass
class Node:
    """A place in a tree. A module that is registered twice has two places."""

    module: nn.Module
    #: Dotted, "" for the root.
    path: str
    #: 0 for the root.
    depth: int
    #: The path under which the module comes first, if this is a later one; then it has no children here.
    same_as: str | None
    children: list[Node] = field(default_factory=list)


def root_of(model: object) -> nn.Module:
    """Return the module that was given, or the one that `torch.compile` has wrapped.

    Raises
    ------
    ConfigError
        It is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        inner: nn.Module = model._modules["_orig_mod"]
        return inner
    return model


def walk(root: nn.Module) -> list[Node]:
    """List every place in the tree, parents before children, in the order of definition.

    A module's children are listed at its first place alone, so that a cycle ends.
    """
    found: list[Node] = []
    first: dict[int, str] = {}
    pending = [Node(root, "", 0, None)]
    while pending:
        node = pending.pop()
        found.append(node)
        known = first.setdefault(id(node.module), node.path)
        if known != node.path:
            node.same_as = known
        elif not is_scripted(type(node.module)):  # such a one's modules live in C++, and take no hooks
            node.children = [
                Node(child, f"{node.path}.{name}" if node.path else name, node.depth + 1, None)
                for name, child in node.module._modules.items()
                if child is not None
            ]
            pending.extend(reversed(node.children))
    return found


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as the user knows it."""
    return original_class(type(module)).__name__


def entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield a module's own masters: name, tensor, whether it is a parameter. Nothing is fetched.

    A TorchScript module's are those of all of it.
    """
    if is_scripted(type(module)):
        yield from ((name, tensor, True) for name, tensor in module.named_parameters())
        yield from ((name, tensor, False) for name, tensor in module.named_buffers())
        return
    yield from own_masters(module)
