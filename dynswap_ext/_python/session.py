"""A session of the pure-Python provider: the native engine's semantics without prefetch, wherever torch runs.

A weight is copied when it is accessed. The copy is dropped with the tensor that was handed out or, inside a
module's call, when that call ends. With a budget, some weights stay on the device between accesses
(residents). The native extension is never imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dynswap_ext._python.access import Access, is_plain, take_over
from dynswap_ext._python.attribute import ModuleState
from dynswap_ext._python.calls import inside_call
from dynswap_ext._python.destination import Destination
from dynswap_ext._python.device_copy import Weight
from dynswap_ext._python.held_copies import exclusive, held
from dynswap_ext._python.residency import choose_residents
from dynswap_ext._swap.protocol import Hooks, Service
from dynswap_ext._swap.state import STATE_KEY, modules_of, original_class, session_of, set_class
from dynswap_ext._swap.subclasses import inner_names
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import exact_bytes
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.config import Budget, Options
from dynswap_ext.errors import BudgetError
from dynswap_ext.lossless.tensor import LosslessTensor

#: A module, with the class and the state that it is to get. Without a state (None) it is a plain module.
_Change = tuple[nn.Module, type, Any]


class Session(Access):
    """One install, served in pure Python. `dynswap_ext._swap.protocol.Session` documents most methods.

    A session owns no module and no master. The states of modules own the weights, and the device memory of a
    weight is freed with it.
    """

    provider = "python"
    backend = "python"
    #: Always 0, as residents of this provider do not give way to others.
    given_way_bytes = 0
    #: Always False, as this provider does not know what a CUDA graph has captured.
    captured = False

    def __init__(self, options: Options, budget: Budget, hooks: Hooks) -> None:
        super().__init__(options, budget, hooks)
        self._states: weakref.WeakSet[ModuleState] = weakref.WeakSet()
        #: The changes that `begin` will make.
        self._draft: list[_Change] = []

    # Modules ------------------------------------------------------------------------------------------

    def draft(self, root: nn.Module, swap_class: Callable[[type], type | None], plan: object = None) -> str:
        with exclusive:
            draft = self._survey(root, swap_class, joins=False)
            self._root = weakref.ref(root)
            asked = {state: state.weights for _, _, state in draft if state is not None}
            self._make_plan(asked, self._budget)
            self._draft = draft
        return ""

    def saved_plan(self) -> dict[str, Any]:
        return {}

    def begin(self) -> None:
        changes, self._draft = self._draft, []
        earlier = {session for module, *_ in changes if isinstance(session := session_of(module), Session)}
        # While the lock is held no access is under way, and the next one finds the new state.
        with exclusive:
            given_up = self._swap(changes)  # these states own the weights of earlier sessions
            for session in earlier:
                self._take_copies(session)
        del given_up
        for session in earlier:
            if not session.modules:
                session.close()

    def attach(self, root: nn.Module, swap_class: Callable[[type], type | None]) -> int:
        with exclusive:
            found = self._survey(root, swap_class, joins=True)
            self.outdated = True  # the modules that join are in the next plan
            self._swap(found)
        return len(found)

    def _survey(
        self, root: nn.Module, swap_class: Callable[[type], type | None], *, joins: bool
    ) -> list[_Change]:
        """Return the class and the state that each module of a tree is to get.

        An installed module that this session will not serve gets its original class back. With `joins`,
        modules that a session serves already are left out.
        """
        classes: dict[type, type | None] = {}
        found: list[_Change] = []
        modules = modules_of(root)
        request = self.hooks.plan_request(modules)
        exceptions = request.cast_although_joining() if joins else request.kept_in_float32()
        for place, module in enumerate(modules):
            if joins and session_of(module) is not None:
                continue
            cls, served = type(module), place not in request.left_alone
            if served and cls not in classes:
                classes[cls] = swap_class(cls)
            swap: Any = classes.get(cls) if served else None
            if swap is None:
                if session_of(module) is not None:
                    found.append((module, original_class(cls), None))
                continue
            for name in (*module._parameters, *module._buffers):
                swap._dynswap_ensure(name)
            destinations = self._destinations(module, exceptions.get(place, frozenset()), joins)
            found.append((module, swap, ModuleState(self, module, destinations, request.ignore.get(place))))
        return found

    def _swap(self, changes: Sequence[_Change]) -> list[_Change]:
        """Give modules new classes and states, and return the old ones. An error restores those."""
        before = [(module, type(module), module.__dict__.get(STATE_KEY)) for module, _, _ in changes]
        try:
            for change in changes:
                _become(*change)
        except BaseException:
            for change in before:
                _become(*change)
            raise
        self._states.update(state for _, _, state in changes if state is not None)
        return before

    def detach(self, root: nn.Module) -> None:
        self.flush()
        with exclusive:
            self._describe()
            held.update((copy, copy.owner()) for copy in self._held())
        served = [module for module in modules_of(root) if session_of(module) is self]
        self._swap([(module, original_class(type(module)), None) for module in served])

    @property
    def modules(self) -> int:
        return sum(state.in_effect() for state in self.states())

    def states(self) -> list[ModuleState]:
        with exclusive:
            return list(self._states)

    inside_call = staticmethod(inside_call)

    def check(self, module: nn.Module) -> None:
        state = module.__dict__[STATE_KEY]
        now = self.weights_of(module, state)  # compared by identity
        self.outdated |= now != state.weights or any(w.planned != w.to_plan() for w in now.values())

    def replan(self, root: nn.Module, budget: Budget) -> None:
        self.outdated = False
        self.flush()
        with exclusive:
            served = [module for module in modules_of(root) if session_of(module) is self]
            states = [module.__dict__[STATE_KEY] for module in served]
            weights = [self.weights_of(*each) for each in zip(served, states, strict=True)]
            try:
                self._make_plan(dict(zip(states, weights, strict=True)), budget.bytes)
            except BaseException:
                self.outdated = True  # there may be room another time
                raise

    def release_memory(self, root: nn.Module) -> None:
        self.flush()
        with exclusive:
            self._collect()
            for weight in list(self._weights.values()):
                self._forget(weight)

    def bring_residents(self) -> None:
        with exclusive:
            for weight in list(self._weights.values()):
                if weight.resident:
                    self._current_copy(weight)

    def retune(self, root: nn.Module, budget: Budget) -> dict[str, Any]:
        seen = self._seen()
        self.replan(root, budget)
        return seen

    def call_begins(self, module: nn.Module) -> None:
        self._calls += 1
        # In a backward, checkpointed parts of a forward run again: that is no pass.
        if self.outdated or torch._C._current_graph_task_id() == -1:
            self.hooks.call_begins(self, module)

    def services(self, module: nn.Module) -> dict[str, Service]:
        state = module.__dict__[STATE_KEY]

        def service_of(name: str, master: torch.Tensor) -> Service:
            if self.destination_of(state, name).holds(master):
                return "in place"
            weight = state.weights.get(name)
            if weight is None:
                apart = not isinstance(master, LosslessTensor) and inner_names(master) is not None
                return "streamed" if apart else "converted"
            return "resident" if weight.resident else "streamed"

        return {
            name: "ignored" if name in state.ignored else service_of(name, master)
            for name, master, _ in own_masters(module)
        }

    def adopt(self, module: nn.Module, name: str) -> None:
        swap: Any = type(module)
        swap._dynswap_ensure(name)  # the weight is found at its first access
        state = module.__dict__[STATE_KEY]
        if name not in state.destinations:
            state.destinations[name] = self._destination_of_late(_master(module, name))

    def _destinations(
        self, module: nn.Module, exceptions: frozenset[str], joins: bool
    ) -> dict[str, Destination]:
        """Return the device and dtype for each of a module's masters, by name (Note [What dtype= casts]).

        `exceptions` are the masters that this note treats differently from the others, `joins` whether the
        module was added after the install.
        """
        found = {}
        for name in (*module._parameters, *module._buffers):
            master = _master(module, name)
            if master is None or (joins and name not in exceptions):
                found[name] = self._destination_of_late(master)
            else:
                found[name] = self._in_float32 if name in exceptions and not joins else self._destination
        return found

    def _destination_of_late(self, master: torch.Tensor | None) -> Destination:
        known = self._weights.get(id(master))
        return self._of_late if known is None or known.master is not master else known.destination

    def keep_dtype(self, module: nn.Module, name: str) -> None:
        module.__dict__[STATE_KEY].destinations[name] = Destination(self.device, None)

    def dtype_of(self, module: nn.Module, name: str) -> torch.dtype | None:
        state, master = module.__dict__.get(STATE_KEY), _master(module, name)
        if state is None or master is None:
            return self.dtype
        if name in state.ignored:
            return master.dtype
        return self.destination_of(state, name).dtype_for(master)

    def weights_of(self, module: nn.Module, state: ModuleState) -> dict[str, Weight]:
        return {
            name: self._weight(master, self.destination_of(state, name))
            for name, master, _ in own_masters(module)
            if name not in state.ignored
            and is_plain(master)
            and not self.destination_of(state, name).holds(master)
        }

    def _make_plan(self, plan: dict[ModuleState, dict[str, Weight]], budget: int | None) -> None:
        """Choose the residents among the weights of modules within a budget.

        Raises BudgetError if the budget is too small. Nothing has changed then.
        """
        size_of = {weight: weight.to_plan() for weights in plan.values() for weight in weights.values()}
        together = max((sum(size_of[w] for w in weights.values()) for weights in plan.values()), default=0)
        at_once, kept = self._needed_and_kept(plan, size_of)
        self._check_budget(budget, kept, size_of, at_once)
        self._budget = budget
        for state, weights in plan.items():
            for name, old in state.weights.items():
                if name in weights:
                    take_over(weights[name], old)
            state.weights = weights
        for weight, size in size_of.items():
            weight.planned, weight.resident, weight.counts.resident = size, False, False
            weight.counts.bytes = weight.destination.bytes_for(weight.master)
        planned = [weight for weight, size in size_of.items() if size]
        sizes = [size_of[weight] for weight in planned]
        residents = choose_residents(
            sizes, budget, max(together, at_once), [weight in kept for weight in planned]
        )
        for weight, resident in zip(planned, residents, strict=True):
            weight.resident = weight.counts.resident = resident
        self._counts = dict.fromkeys(weight.counts for weight in planned)
        self._used = dict.fromkeys(counts for counts in self._used if counts in self._counts)
        self._describe()
        self._plan.update(
            groups=len(planned),
            resident_groups=sum(residents),
            weight_bytes=sum(sizes),
            resident_bytes=sum(size for size, resident in zip(sizes, residents, strict=True) if resident),
        )

    def _take_copies(self, earlier: Session) -> None:
        """Take over what tensors and graphs still hold of weights that an earlier session has served."""
        earlier._collect()
        present = [state.weights.values() for state in earlier.states() if state.in_effect()]
        still_served = {weight for weights in present for weight in weights}
        for old in list(earlier._weights.values()):
            new, copy = self._weights.get(id(old.master)), old.copy
            if new is None or new.master is not old.master or old in still_served:
                continue
            if new.destination == old.destination:
                new.fetched, new.noted = old.fetched, old.noted  # autograd graphs refer to these
                if copy in held:
                    old.copy, new.copy = None, copy
                    copy.owner, copy.session = weakref.ref(new), self

    def _needed_and_kept(
        self, plan: dict[ModuleState, dict[str, Weight]], size_of: dict[Weight, int]
    ) -> tuple[int, set[Weight]]:
        """Return the most bytes besides kept weights that one call needs at once, and the kept weights."""
        modules = {
            module: weights for state, weights in plan.items() if (module := state.owner()) is not None
        }
        together: dict[int, dict[Weight, None]] = {}
        kept: set[Weight] = set()
        request = self.hooks.plan_request(list(modules))
        for place, weights in enumerate(modules.values()):
            kept.update(weights[name] for name in request.keep.get(place, ()) if name in weights)
            if request.at_once[place]:
                together.setdefault(request.units[place], {}).update(dict.fromkeys(weights.values()))
        needed = (sum(size_of[weight] for weight in unit if weight not in kept) for unit in together.values())
        return max(needed, default=0), kept

    def _check_budget(
        self, budget: int | None, kept: set[Weight], size_of: dict[Weight, int], at_once: int
    ) -> None:
        """Raise BudgetError for a budget that is too small.

        It has to hold the weights that are kept, plus the largest of the others or, if they are more, the
        `at_once` bytes that one call needs.
        """
        held = sum(map(size_of.__getitem__, kept))
        largest = max((size for weight, size in size_of.items() if weight not in kept), default=0)
        smallest = held + max(largest, at_once)
        if budget is None or smallest <= budget:
            return
        refused = "cannot hold the largest group of weights"
        if held:
            names = [self._name(weight) for weight, size in size_of.items() if size and weight in kept]
            refused = (
                f"does not hold the weights that keep= names ({listed(names)}), which take "
                f"{exact_bytes(held)}, and the largest group of the others"
            )
        raise BudgetError(
            f"a budget of {exact_bytes(budget)} {refused}; the smallest budget that works is "
            f"{exact_bytes(smallest)}",
            smallest,
        )


def _become(module: nn.Module, cls: type, state: Any) -> None:
    """Give a module a class and a state. The class comes first, because it serves the module in any state."""
    set_class(module, cls)
    if state is not None:
        module.__dict__[STATE_KEY] = state
    else:
        module.__dict__.pop(STATE_KEY, None)


def _master(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return module._buffers.get(name) if parameter is None else parameter
