"""Which modules are experts: a router chooses some of them for each token, in no order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeGuard

from torch import nn
from torch.nn.parameter import is_lazy

from dynswap_ext._util.own_masters import own_masters

#: Fused experts are the slices of one parameter with at least as many dimensions.
_FUSED_DIMENSIONS: Final = 3
#: In names of a checkpoint: one expert of several, as in "mlp.experts.3.", and what fused experts are called.
_ONE_OF_SEVERAL: Final = re.compile(r".*?\w*expert\w*\.(expert_?)?\d+(?=\.)")
_OF_EXPERTS: Final = re.compile(r"expert|exps|(^|[._])moe")


class Experts(NamedTuple):
    """What of a module is used without an order."""

    #: How many experts its parameters are the slices of, along their first dimension; 0: none.
    slices: int = 0
    #: The place of the expert that the module is, or is a part of; -1: it is none.
    expert: int = -1


def experts_of_modules(
    modules: Sequence[nn.Module], stacked: Iterable[int] | None = None
) -> dict[int, Experts]:
    """Return the modules that are experts, or have the weights of several, by their places.

    Fused experts are one parameter of three dimensions, whose first is the number of experts: an attribute of
    the module with "experts" in its name, as in transformers (`num_experts`). Other experts are the children
    of a list or dict of modules that has "expert" in its name. If these are lists themselves, one for each
    layer, experts are the children of those.

    Parents come before their children. `stacked` are the places of the modules that have a parameter of three
    dimensions; by default, each is looked at.
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
        for name, child in list(module._modules.items())  # another thread may add some
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
    """Return which of the named weights are experts, as far as names and shapes tell.

    For fused experts that is how many there are, for others the name of the expert, and else nothing.
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
    """Return the innermost lists or dicts of modules in a list or dict; itself if it contains none."""
    lists = [child for child in modules.children() if isinstance(child, nn.ModuleList | nn.ModuleDict)]
    return [inner for each in lists for inner in _lists_in(each)] or [modules]


def is_stacked(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Return whether a parameter may have fused experts: it is there, and has enough dimensions."""
    if parameter is None or is_lazy(parameter) or parameter.is_nested:
        return False
    return parameter.dim() >= _FUSED_DIMENSIONS


def _fused(module: nn.Module) -> int:
    sizes = {each.shape[0] for each in module._parameters.values() if is_stacked(each)}
    if not sizes:
        return 0
    counts = [value for name, value in vars(module).items() if "experts" in name and type(value) is int]
    return next((count for count in counts if count > 1 and count in sizes), 0)
