"""Finds the experts of a model: modules of which a router chooses some for each token, in no fixed order.

Fused experts are the slices of one parameter along its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy

from dynswap_ext._util.own_masters import own_masters

#: A parameter with fused experts has at least so many dimensions.
_FUSED_DIMENSIONS: Final = 3
#: In the name of a checkpoint's weight: one expert of several, as in "mlp.experts.3.".
_ONE_OF_SEVERAL: Final = re.compile(r".*?\w*expert\w*\.(expert_?)?\d+(?=\.)")
#: In the name of a checkpoint's weight: a word for fused experts.
_OF_EXPERTS: Final = re.compile(r"expert|exps|(^|[._])moe")


class Experts(NamedTuple):
    """The experts in one module: fused ones in its parameters, or the one that it belongs to."""

    #: How many experts are fused in the module's parameters; 0: none are.
    slices: int = 0
    #: The place, in a list of modules, of the expert that the module is or is a part of; -1: there is none.
    expert: int = -1


def experts_of_modules(
    modules: Sequence[nn.Module], stacked: Iterable[int] | None = None
) -> dict[int, Experts]:
    """Return which modules belong to an expert or have fused experts, by their places in `modules`.

    Fused experts are a parameter of three or more dimensions. The first one has the size of an attribute of
    the module with "experts" in its name, as `num_experts` in transformers. Other experts are the children,
    two or more, of a list or dict of modules with "expert" in its name. If that contains lists or dicts, one
    for each layer, the experts are the children of the innermost ones.

    Parameters
    ----------
    modules
        Parents come before their children.
    stacked
        The places of the modules that may have fused experts. Default: all.
    """
    found = {
        place: Experts(slices)
        for place in (range(len(modules)) if stacked is None else stacked)
        if (slices := _fused(modules[place]))
    }
    lists = [
        child
        for module in modules
        if module._modules
        for name, child in list(module._modules.items())  # another thread may add children
        if "expert" in name and isinstance(child, nn.ModuleList | nn.ModuleDict)
    ]
    place_of = {id(module): place for place, module in enumerate(modules)} if lists else {}
    expert_of: dict[int, int] = {}
    for each in lists:
        for experts in _lists_in(each):
            several = [
                one
                for one in experts.children()
                if id(one) in place_of and any(map(own_masters, one.modules()))
            ]
            for one in several if len(several) > 1 else ():
                for part in one.modules():
                    expert_of.setdefault(id(part), place_of[id(one)])
    for key, expert in expert_of.items():
        if key in place_of:
            found[place_of[key]] = Experts(expert=expert)
    return found


def experts_of_names(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, str]]:
    """Return which weights belong to experts, as far as their names and shapes tell.

    `shapes` has all weights of the model by name. In the result, a weight with fused experts has their number
    and "", and a weight of one expert has 0 and the name of the expert. Other weights are left out.
    """
    found: dict[str, tuple[int, str]] = {}
    lists: dict[str, set[str]] = {}
    fused: dict[str, int] = {}
    for name, shape in shapes.items():
        one = _ONE_OF_SEVERAL.match(name)
        if one:
            found[name] = 0, one[0]
            lists.setdefault(one[0].rpartition(".")[0], set()).add(one[0])
        elif len(shape) >= _FUSED_DIMENSIONS and shape[0] > 1 and _OF_EXPERTS.search(name):
            fused.setdefault(name.rpartition(".")[0], shape[0])
    for name, shape in shapes.items():
        if name in found:
            if len(lists[found[name][1].rpartition(".")[0]]) == 1:
                del found[name]
        elif len(shape) > 1 and fused.get(name.rpartition(".")[0]) == shape[0]:
            found[name] = shape[0], ""
    return found


def _lists_in(modules: nn.Module) -> list[nn.Module]:
    """Return the innermost lists and dicts of modules in such a container, or itself if it has none."""
    lists = [child for child in modules.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    return [inner for each in lists for inner in _lists_in(each)] or [modules]


def is_stacked(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Return whether a parameter exists and has enough dimensions for fused experts."""
    if parameter is None or is_lazy(parameter) or parameter.is_nested:
        return False
    return parameter.dim() >= _FUSED_DIMENSIONS


def _fused(module: nn.Module) -> int:
    sizes = {each.shape[0] for each in module._parameters.values() if is_stacked(each)}
    if not sizes:
        return 0
    counts = [value for name, value in vars(module).items() if "experts" in name and type(value) is int]
    return next((count for count in counts if count > 1 and count in sizes), 0)
