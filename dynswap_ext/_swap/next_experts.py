"""Guesses which experts the next layer will choose, from the inputs of this layer's experts.

Note [A guess at the next experts]
A layer changes its input little. So if the router of the next layer is applied to the input of this layer's
router, it names most of the experts that it will choose (docs/decisions/032-experts-before-their-router.md).
That takes one small product. It is queued before the host waits for this layer's choice, so the wait becomes
no longer. The guess decides what is copied ahead, never what is computed. The engine measures whether guesses
pay, and has them left out if not (Note [Experts of the next layer] in csrc/core/by_use.h).

Only forwards without gradients guess, and only for few rows: many rows use most of the experts anyway. A
guess asks for no memory outside the budget. It is left out if the install does not serve the router, or
cannot read its weight.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from dynswap_ext._util.experts import Experts, is_stacked
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced
from dynswap_ext.lossless.tensor import LosslessTensor


class Guesses(Protocol):
    """A session that fetches experts ahead that are only guessed."""

    def fetch_for_guess(self, master: torch.Tensor) -> torch.Tensor | None:
        """Return a router's weight on the device; None if it is not served, or if the budget has no room."""

    def guess_slices(self, master: torch.Tensor, indices: Sequence[int]) -> int:
        """Fetch some of these slices ahead, the likeliest first; return how many guesses to leave out."""


class NextExperts:
    """The experts of the next layer, and their router: guesses which of them will be chosen."""

    def __init__(self, router: nn.Module, experts: nn.Module, name: str, rest: list[int]) -> None:
        self._router = weakref.ref(router)
        self._experts = weakref.ref(experts)
        self._name = name
        #: One number, which all layers share: how many guesses to leave out.
        self._rest = rest

    @untraced
    def ranked(self, source: Guesses, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the indices of the experts, the likeliest for these rows first; None if there is no guess.

        The tensor is on the CPU. It has its values once the device has reached work that is queued later.
        """
        router = self._router()
        master = None if router is None else _weight_of(router)
        if torch.is_grad_enabled() or master is None or type(rows) is not torch.Tensor:
            return None
        if self._rest[0] > 0:
            self._rest[0] -= 1
            return None
        if not 0 < rows.shape[0] <= master.shape[0] or rows.shape[1] != master.shape[1]:
            return None
        try:
            weight = source.fetch_for_guess(master)
        except Exception:  # the access that needs the weight raises it again
            return None
        if weight is None:
            return None
        with unseen_by_modes():
            likely = F.linear(rows.to(weight.dtype), weight).amax(0)
            return likely.argsort(descending=True).to("cpu", non_blocking=True)

    def guess(self, source: Guesses, ranked: torch.Tensor, count: int) -> None:
        """Have the `count` likeliest experts fetched ahead, once `ranked` has its values."""
        experts = self._experts()
        master = None if experts is None else experts._parameters.get(self._name)
        if master is not None:
            self._rest[0] = source.guess_slices(master, ranked.tolist()[:count])


#: The dtypes in which torch multiplies matrices on any device.
_DTYPES: Final = frozenset([torch.float32, torch.float64, torch.bfloat16, torch.float16])
#: By the id of the first fused parameter of a module: the module, the parameter's name and the next experts.
#: There is no weak reference to the parameter, for which `torch.utils.swap_tensors` would refuse it. So a
#: lookup asks the module whether it still has that parameter.
_following: Final[dict[int, tuple[weakref.ref[nn.Module], str, NextExperts]]] = {}


def following(master: torch.Tensor) -> NextExperts | None:
    """Return the next experts, given the first fused parameter of a module; None for other parameters."""
    module, name, following = _following.get(id(master), (None, "", None))
    experts = None if module is None else module()
    return following if experts is not None and experts._parameters.get(name) is master else None


def find_routers(modules: Sequence[nn.Module], experts: Mapping[int, Experts], models: Sequence[int]) -> None:
    """Find which fused experts follow which in the same model, and their routers.

    A router is a child of the same module as its experts, and its weight has a row for each expert. `experts`
    is by place in `modules`. `models` has a number for each module, the same for all modules of one model.
    """
    for key, (module, name, _) in list(_following.items()):
        before = module()
        if before is not None and id(before._parameters.get(name)) != key:
            _following.pop(key, None)
    fused = {id(modules[place]): found.slices for place, found in experts.items() if found.slices}
    if not fused:
        return
    layers = [
        (child, router)
        for parent in modules
        for child in list(parent._modules.values())
        if child is not None and id(child) in fused
        for router in [_router(parent, fused[id(child)])]
        if router is not None
    ]
    model_of = {id(modules[place]): models[place] for place in experts}
    rest = [0]
    for (before, _), (after, router) in itertools.pairwise(layers):
        first, follows = _first_fused(before, fused[id(before)]), _first_fused(after, fused[id(after)])
        master = before._parameters.get(first)
        if master is None or model_of[id(before)] != model_of[id(after)]:
            continue
        of = weakref.ref(before, partial(_forget, id(master)))
        _following[id(master)] = of, first, NextExperts(router, after, follows, rest)


def _forget(key: int, gone: weakref.ref[nn.Module]) -> None:
    if key in _following and _following[key][0] is gone:  # another master may have its identity now
        del _following[key]


def _router(parent: nn.Module, count: int) -> nn.Module | None:
    for child in list(parent._modules.values()):  # another thread may add some
        weight = None if child is None else _weight_of(child)
        if weight is not None and weight.shape[0] == count:
            return child
    return None


def _weight_of(router: nn.Module) -> nn.Parameter | None:
    weight = router._parameters.get("weight")
    if type(weight) not in (nn.Parameter, LosslessTensor) or weight is None:
        return None
    if weight.is_nested or weight.layout is not torch.strided:
        return None
    return weight if weight.dim() == 2 and weight.dtype in _DTYPES else None


def _first_fused(experts: nn.Module, count: int) -> str:
    stacked = ((name, each) for name, each in list(experts._parameters.items()) if is_stacked(each))
    return next((name for name, each in stacked if each.shape[0] == count), "")
