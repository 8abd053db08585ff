"""The pure-Python provider: the native engine's semantics without prefetch, wherever torch runs.

A weight is copied when it is accessed and dropped with the tensor that was handed out. With a budget,
some weights stay on the device between accesses (residents). Never imports the native extension.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._attribute import Attribute, ModuleState
from ._exclusive import Exclusive
from ._handout import Copy, Place, Weight
from ._residency import choose_residents
from ._state import STATE_KEY, modules_of, name_in, session_of, set_class
from .errors import BudgetError, OutOfMemoryError

__all__ = ["Attribute", "ModuleState", "Session"]

SwapClass = Callable[[type], "type | None"]


class Session:
    """One install. Thread-safe.

    It owns no module and no master; their states own the weights, whose device memory goes with them.
    """

    provider = "python"
    backend = "torch"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        prefetch: int,
        budget: int | None,
        strict_budget: bool,
        pin: bool | None,
        backend: str,
        warn: Callable[[str], None],
    ) -> None:
        self._place = Place(device, dtype)
        self._budget = budget
        self._strict = strict_budget
        self._warn = warn
        self._warned: set[str] = set()
        self._closed = False
        self._root: Callable[[], nn.Module | None] = lambda: None
        # LOCK: guards everything below except the deques.
        self._exclusive = Exclusive(self._settle_deaths)
        # By the master's id. The modules' states own the weights, which own the residents' copies.
        self._weights: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._held: dict[int, Copy] = {}
        self._orphans: dict[int, Copy] = {}
        self._bytes = 0
        self._freed: deque[int] = deque()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._plan = dict.fromkeys(_PLAN, 0)
        self._deaths: deque[tuple[int, bool]] = deque()
        _sessions.add(self)

    # Modules ------------------------------------------------------------------------------------------

    def attach(self, root: nn.Module, swap_class: SwapClass) -> int:
        """Swap every module of the tree; all of them, or none if an error is raised."""
        classes: dict[type, type | None] = {}
        found: list[tuple[nn.Module, ModuleState]] = []
        with self._exclusive:
            self._root = weakref.ref(root)
            for module in modules_of(root):
                cls = type(module)
                if cls not in classes:
                    classes[cls] = swap_class(cls)
                if classes[cls] is not None:
                    found.append((module, self._state_for(module)))
            self._make_plan([state for _, state in found])
            swapped: list[tuple[nn.Module, type]] = []
            try:
                for module, state in found:
                    cls = type(module)
                    swap: Any = classes[cls]
                    for name in (*module._parameters, *module._buffers):
                        swap._dynswap_ensure(name)
                    set_class(module, swap)
                    swapped.append((module, cls))
                    module.__dict__[STATE_KEY] = state
            except BaseException:
                for module, cls in swapped:
                    set_class(module, cls)
                    module.__dict__.pop(STATE_KEY, None)
                raise
        return len(found)

    def detach(self, root: nn.Module) -> None:
        """Give every module of the tree that this session serves its own class back."""
        self.flush()
        for module in modules_of(root):
            if session_of(module) is self:
                original = type(module).__dict__.get("_dynswap_original")
                if original is not None:
                    set_class(module, original)
                del module.__dict__[STATE_KEY]

    def adopt(self, module: nn.Module, name: str) -> None:
        """Serve a name registered after the install; weights are found at their first access."""
        swap: Any = type(module)
        swap._dynswap_ensure(name)

    def _state_for(self, module: nn.Module) -> ModuleState:
        state = ModuleState(self, module)
        for members in (module._parameters, module._buffers):
            for name, master in members.items():
                if master is not None and _is_plain(master) and not self._place.holds(master):
                    state.weights[name] = self._weight(master)
        return state

    def _weight(self, master: torch.Tensor) -> Weight:
        """The weight of a master; one for all modules that share it."""
        weight = self._weights.get(id(master))
        if weight is None or weight.master() is not master:
            weight = self._weights[id(master)] = Weight(master)
        return weight

    def _make_plan(self, states: list[ModuleState]) -> None:
        size_of = {
            weight: self._place.bytes_for(master)
            for weight in self._weights.values()
            if (master := weight.master()) is not None
        }
        weights, sizes = list(size_of), list(size_of.values())
        together = max((sum(size_of[w] for w in state.weights.values()) for state in states), default=0)
        residents = choose_residents(sizes, self._budget, together)
        for weight, resident in zip(weights, residents, strict=True):
            weight.resident = resident
        self._plan.update(
            groups=len(weights),
            resident_groups=sum(residents),
            weight_bytes=sum(sizes),
            resident_bytes=sum(size for size, resident in zip(sizes, residents, strict=True) if resident),
        )

    # Access -------------------------------------------------------------------------------------------

    def hand_out(
        self, state: ModuleState, name: str, master: torch.Tensor, *, is_param: bool, training: bool
    ) -> torch.Tensor:
        """The tensor that an access to `name` gets."""
        if self._closed or self._place.holds(master):
            return master
        if torch.compiler.is_compiling() or not _is_plain(master):
            converted = self._place.convert(master)
            if is_param:
                converted._is_param = True
            return converted
        with self._exclusive:
            weight = state.weights.get(name)
            if weight is None or weight.master() is not master:
                weight = state.weights[name] = self._replaced(weight, master)
            copy = self._current_copy(weight, master)
            if training and not is_param and master.is_floating_point():
                copy.compare = True  # F.batch_norm writes its running statistics without a trace
            self._held[id(copy)] = copy
            return copy.tensor(master, is_param, id(copy), weakref.ref(self), _died)

    def _replaced(self, old: Weight | None, master: torch.Tensor) -> Weight:
        new = self._weight(master)
        if old is not None and old.resident and new.copy is None:
            # The place in the plan stays with the module's name.
            old.resident, old.copy = False, None
            new.resident = True
        return new

    def _current_copy(self, weight: Weight, master: torch.Tensor) -> Copy:
        copy = weight.copy
        if copy is not None:
            if copy.current(master):
                if copy.written():
                    copy.write_back(master)
                self._counters["hits"] += 1
                return copy
            weight.copy = copy = None  # the master wins; what was handed out stays as it is
            self._counters["refetches"] += 1
        self._sweep()
        self._make_room(weight, self._place.bytes_for(master))
        begin = time.perf_counter_ns()
        try:
            copy = weight.copy = Copy(weight, master, self._place, self._freed)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no device memory for {self._name(weight)} ({self._place.bytes_for(master)} bytes): {error}"
            ) from error
        counters = self._counters
        counters["stall_ns"] += time.perf_counter_ns() - begin
        counters["misses"] += 1
        counters["copies"] += 1
        counters["bytes_moved"] += master.numel() * master.element_size()
        self._bytes += copy.nbytes
        counters["peak_bytes"] = max(counters["peak_bytes"], self._held_bytes())
        return copy

    def _make_room(self, weight: Weight, size: int) -> None:
        """Invariant 4: over budget only where handed-out tensors that somebody keeps leave no room."""
        if self._budget is None or self._held_bytes() + size <= self._budget:
            return
        holders = ", ".join(sorted({self._name(copy.weight) for copy in self._held.values()})[:5])
        message = (
            f"the budget of {self._budget} bytes is full: tensors handed out from {holders} are kept alive "
            "(by a list, or by an autograd graph)"
        )
        if self._strict:
            raise BudgetError(f"{message}, and strict_budget=True", self._held_bytes() + size)
        self._counters["overflow_bytes"] += size
        self._warn_once("overflow", f"{message}; more memory than the budget is used")

    # What was handed out ------------------------------------------------------------------------------

    def flush(self) -> None:
        """What was written on handed-out tensors is in the masters when this returns."""
        with self._exclusive:
            self._settle_deaths()
            self._sweep()
            for copy in list(self._held.values()):
                master = copy.weight.master()
                if master is not None and copy.weight.copy is copy and copy.current(master):
                    copy.write_back(master)

    def _settle(self, key: int, aliased: bool) -> None:
        """A handed-out tensor has died."""
        copy = self._held.get(key)
        if copy is None:
            return
        if aliased:
            # `w.data`, `w.detach()`: the bytes can still be written, and with no version counter's trace.
            copy.compare = True
            self._orphans[key] = copy
        if copy.handed is not None and copy.handed() is not None:
            return  # handed out again since
        copy.handed = None
        if not aliased:
            self._finish(copy)

    def _sweep(self) -> None:
        for copy in list(self._orphans.values()):
            if copy.handed is None and not copy.aliased():
                self._finish(copy)

    def _finish(self, copy: Copy) -> None:
        """Nobody can write the copy's bytes any more."""
        self._held.pop(id(copy), None)
        self._orphans.pop(id(copy), None)
        weight = copy.weight
        master = weight.master()
        superseded = weight.copy is not copy
        if master is not None:
            if not superseded and copy.current(master):
                copy.write_back(master)
            elif copy.written():
                self._warn_lost(weight)
        copy.compare = False
        if not superseded and not weight.resident:
            weight.copy = None

    def _held_bytes(self) -> int:
        """Device bytes of all copies that exist."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        return self._bytes

    # Figures ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters and plan, named as in csrc/core/stats.h."""
        with self._exclusive:
            self._settle_deaths()
            self._sweep()
            return {**self._counters, **self._plan, "live_leases": len(self._held)}

    def reset_stats(self) -> None:
        """Set the counters to zero; the plan stays."""
        with self._exclusive:
            self._counters = dict.fromkeys(_COUNTERS, 0)
            self._counters["peak_bytes"] = self._held_bytes()

    def close(self) -> None:
        """Let go of device memory, except what handed-out tensors hold; those can still be written."""
        with self._exclusive:
            self._closed = True
            for weight in list(self._weights.values()):
                weight.resident = False
                if weight.copy is not None and id(weight.copy) not in self._held:
                    weight.copy = None

    def _name(self, weight: Weight) -> str:
        root, master = self._root(), weight.master()
        return "a weight" if root is None or master is None else name_in(root, master)

    def _warn_lost(self, weight: Weight) -> None:
        self._warn_once(
            "lost",
            f"a tensor handed out from {self._name(weight)} was written in place although its master had "
            "changed since; the master stands, and what was written is dropped",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(message)

    def _settle_deaths(self) -> None:
        while self._deaths:
            self._settle(*self._deaths.popleft())

    def _on_death(self, key: int) -> None:
        copy = self._held.get(key)
        if copy is None:
            return
        self._deaths.append((key, copy.aliased_at_death()))
        self._exclusive.settle_if_free()


def _died(handed: Any) -> None:
    session = handed.session()
    if session is not None and not sys.is_finalizing():
        session._on_death(handed.key)


def _is_plain(master: torch.Tensor) -> bool:
    """Whether a master's bytes can be copied and compared; others are converted at each access."""
    return (
        type(master) in (torch.Tensor, nn.Parameter)
        and master.layout is torch.strided
        and not master.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(master)
        and not torch._C._are_functorch_transforms_active()
    )


_COUNTERS = (
    "hits",
    "late_hits",
    "misses",
    "prefetches",
    "wasted_prefetches",
    "refetches",
    "copies",
    "bytes_moved",
    "stall_ns",
    "overflow_bytes",
    "peak_bytes",
    "host_synchronisations",
)
_PLAN = ("groups", "resident_groups", "weight_bytes", "resident_bytes", "arena_bytes", "depth")

_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: no thread is left that could release a lock held at the fork."""
    for session in list(_sessions):
        session._exclusive.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
