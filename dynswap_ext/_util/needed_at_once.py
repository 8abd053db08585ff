"""Finds the weights that one call needs at the same time, which even the smallest budget has to hold."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import nn

from dynswap_ext._util.own_masters import own_masters

#: Names of parameters and buffers of torch's own modules, apart from containers.
_OWN_NAMES: Final = re.compile(
    r"weight|weight_[gv]|bias|running_(mean|var)|num_batches_tracked|in_proj_(weight|bias)"
    r"|[qkv]_proj_weight|bias_[kv]|(weight|bias)_(ih|hh|hr)(_l\d+(_reverse)?)?"
)
#: Names in `nn.MultiheadAttention`, which hands the weights of its child `out_proj` to the same function.
_OF_ATTENTION: Final = re.compile(r"in_proj_(weight|bias)|[qkv]_proj_weight")


def units_of_modules(modules: Sequence[nn.Module]) -> tuple[list[int], list[bool]]:
    """Return the unit of each module, and whether a call needs all weights of that unit at once.

    A forward of torch's own hands all weights of its module to one function, so all of them are needed at
    once, with those of the module's parametrizations and, for attention, of its child `out_proj`: these are
    one unit. Any other module is a unit by itself, whose forward may read its weights one after the other.

    In `modules`, parents come before their children. A unit is named by the place of its first module there.
    """
    types = list(map(type, modules))  # read once: another thread may swap classes meanwhile
    classes = {id(cls): cls for cls in types}
    of_torch = {key: _has_forward_of_torch(cls) for key, cls in classes.items()}
    units = list(range(len(modules)))
    at_once = [of_torch[id(cls)] for cls in types]
    first_of: dict[int, int] = {}  # by the identity of a module that is part of a unit
    for place, module in enumerate(modules):
        if at_once[place] and module._modules and id(module) not in first_of:
            at_once[place] = bool(own_masters(module))
            for part in _parts(module) if at_once[place] else ():
                first_of.setdefault(id(part), place)
    for place, module in enumerate(modules) if first_of else ():
        if (first := first_of.get(id(module), place)) < place:
            units[place], at_once[place] = first, True
    return units, at_once


def units_of_names(modules: Mapping[str, Sequence[str]]) -> list[tuple[list[str], bool]]:
    """Return the names of each unit's weights, and whether a call needs all of them at once.

    This is `units_of_modules` for a model of which only names are known. `modules` has the full names of
    weights by the name of their module.
    """
    own = {module: [name.rpartition(".")[2] for name in names] for module, names in modules.items()}
    units: dict[str, tuple[list[str], bool]] = {}
    for module, names in modules.items():
        parametrised, parametrises, _ = module.partition(".parametrizations.")
        parent, _, child = module.rpartition(".")
        if parametrises and own.get(parametrised):
            module = parametrised
        elif child == "out_proj" and any(map(_OF_ATTENTION.fullmatch, own.get(parent, ()))):
            module = parent
        known = all(map(_OWN_NAMES.fullmatch, own[module]))
        units.setdefault(module, ([], known))[0].extend(names)
    return list(units.values())


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and the modules in it whose weights its forward reads together with its own."""
    yield module
    for name in ("parametrizations", "out_proj"):
        child = module._modules.get(name)
        if child is not None and (name != "out_proj" or isinstance(module, nn.MultiheadAttention)):
            yield from child.modules()


def _has_forward_of_torch(cls: type) -> bool:
    # `getattr` would fail for TorchScript, whose descriptor of `forward` needs an instance.
    forward = inspect.getattr_static(cls, "forward", None)
    of_torch = str(getattr(forward, "__module__", None)).startswith("torch.nn.modules.")
    return of_torch and forward is not nn.Module.forward  # that of containers, which are not called
