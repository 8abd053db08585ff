"""What an install asks a session to plan. It is decided here for both providers, which carry it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from dynswap_ext._swap.casting import cast_as_copies
from dynswap_ext._swap.choices import Choices
from dynswap_ext._swap.kept_in_float32 import kept_in_float32
from dynswap_ext._swap.models import Models
from dynswap_ext._swap.next_experts import find_routers
from dynswap_ext._util.experts import Experts, experts_of_modules
from dynswap_ext._util.needed_at_once import units_of_modules


class PlanRequest:
    """How the weights of some modules are to be planned, by a module's place in the list `modules`.

    In `modules`, parents come before their children. What only some plans need (casts, experts) is worked out
    when a session asks for it.
    """

    def __init__(self, modules: Sequence[nn.Module], *, choices: Choices, dtype: torch.dtype | None) -> None:
        self._modules = modules
        self._dtype = dtype
        #: For each module, its unit, whose weights travel together, and whether a call needs all of these at
        #: once.
        self.units, self.at_once = units_of_modules(modules)
        #: For each module, the number of the model that it is in, if several were installed together.
        self.models = _numbers_of_models(modules)
        #: The places of modules that are left alone, and by place the module's own weights that `keep` and
        #: `ignore` name.
        self.left_alone, self.keep, self.ignore = choices.of(modules)

    def kept_in_float32(self) -> dict[int, frozenset[str]]:
        """Return the names of masters that are not cast below float32, by place (Note [Kept in float32])."""
        return kept_in_float32(self._modules, self._dtype)

    def cast_although_joining(self) -> dict[int, frozenset[str]]:
        """Return the names of masters that are cast even in modules that join after the install, by place.

        All other masters of such modules keep their dtype. See Note [What dtype= casts].
        """
        return cast_as_copies(self._modules, self._dtype)

    def experts(self, stacked: Iterable[int]) -> dict[int, Experts]:
        """Return the modules that are experts or have fused ones, by place, and find the experts' routers.

        Experts are used in no fixed order. `stacked` are the places of the modules that have a parameter of
        three or more dimensions.
        """
        found = experts_of_modules(self._modules, stacked)
        find_routers(self._modules, found, self.models)
        return found


def _numbers_of_models(modules: Sequence[nn.Module]) -> list[int]:
    numbers = [0] * len(modules)
    if modules and isinstance(modules[0], Models):
        number, begins = 0, set(map(id, modules[0].children()))
        for place, module in enumerate(modules):
            number += id(module) in begins
            numbers[place] = number
    return numbers
