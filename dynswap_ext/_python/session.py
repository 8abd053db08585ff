"""The pure-Python provider: the native engine's semantics without prefetch, wherever torch runs.

A weight is copied when it is accessed and dropped with the tensor that was handed out; inside a module's
call, at its end. With a budget, some weights stay on the device between accesses (residents). Never imports
the native extension.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynswap_ext._python.attribute import ModuleState
from dynswap_ext._python.calls import inside_call, keep
from dynswap_ext._python.device_copy import Destination, DeviceCopy, Weight, has_tangent
from dynswap_ext._python.held_copies import HeldCopies
from dynswap_ext._python.mapped_files import check_mapped
from dynswap_ext._python.residency import choose_residents
from dynswap_ext._swap.parameter_proxy import make_proxy
from dynswap_ext._swap.protocol import Hooks, Service
from dynswap_ext._swap.state import STATE_KEY, modules_of, session_of, set_class
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.errors import BudgetError, OutOfMemoryError


class Session(HeldCopies):
    """`dynswap_ext._swap.protocol.Session`, which has the meaning of most methods.

    It owns no module and no master; their states own the weights, whose device memory goes with them.
    """

    provider = "python"
    backend = "python"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        budget: int | None,
        strict_budget: bool,
        hooks: Hooks,
        **of_the_engine: Any,
    ) -> None:
        super().__init__(hooks)
        self.device, self.dtype = device, dtype
        self.destination = Destination(device, dtype)
        self._budget = budget
        self._strict = strict_budget
        self.modules = 0
        self.outdated = False
        #: How often the model has been called.
        self._calls = 0

    # Modules ------------------------------------------------------------------------------------------

    def attach(self, root: nn.Module, swap_class: Callable[[type], type | None]) -> int:
        classes: dict[type, type | None] = {}
        found: list[tuple[nn.Module, ModuleState]] = []
        with self._exclusive:
            for module in modules_of(root):
                if session_of(module) is not None:
                    continue
                cls = type(module)
                if cls not in classes:
                    classes[cls] = swap_class(cls)
                if classes[cls] is not None:
                    found.append((module, ModuleState(self, module, self._weights_of(module))))
            if self.modules:
                self.outdated = True  # modules that join an install wait for the next plan
            else:
                self._root = weakref.ref(root)
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
            self.modules += len(found)
        return len(found)

    def detach(self, root: nn.Module) -> None:
        self.flush()
        with self._exclusive:
            self._describe()
        for module in modules_of(root):
            if session_of(module) is self:
                original = type(module).__dict__.get("_dynswap_original")
                if original is not None:
                    set_class(module, original)
                del module.__dict__[STATE_KEY]
                self.modules -= 1

    inside_call = staticmethod(inside_call)

    def check(self, module: nn.Module) -> None:
        # Weights are compared by identity.
        self.outdated |= self._weights_of(module) != module.__dict__[STATE_KEY].weights

    def replan(self, root: nn.Module) -> None:
        self.outdated = False
        self.flush()
        with self._exclusive:
            served = [module for module in modules_of(root) if session_of(module) is self]
            before = {module: module.__dict__[STATE_KEY].weights for module in served}
            try:
                for module in served:
                    weights = module.__dict__[STATE_KEY].weights = self._weights_of(module)
                    for name, old in before[module].items():
                        if name in weights:
                            _take_over(weights[name], old)
                self._make_plan([module.__dict__[STATE_KEY] for module in served])
            except BaseException:
                for module, weights in before.items():
                    module.__dict__[STATE_KEY].weights = weights
                raise

    def retune(self, root: nn.Module, budget: int | None) -> dict[str, Any]:
        seen = self._seen()
        before, self._budget = self._budget, budget
        try:
            self.replan(root)
        except BaseException:
            self._budget = before
            raise
        return seen

    def pass_begins(self) -> None:
        if self.outdated:
            self.hooks.replan(self)
        self._calls += 1
        self.note_pass()
        self.hooks.call_begins(self)

    def services(self, module: nn.Module) -> dict[str, Service]:
        weights = module.__dict__[STATE_KEY].weights

        def service_of(name: str, master: torch.Tensor) -> Service:
            if self.destination.holds(master):
                return "in place"
            weight = weights.get(name)
            if weight is None:
                return "converted"
            return "resident" if weight.resident else "streamed"

        return {name: service_of(name, master) for name, master, _ in own_masters(module)}

    def adopt(self, module: nn.Module, name: str) -> None:
        swap: Any = type(module)
        swap._dynswap_ensure(name)  # the weight is found at its first access

    def _weights_of(self, module: nn.Module) -> dict[str, Weight]:
        return {
            name: self._weight(master)
            for name, master, _ in own_masters(module)
            if _is_plain(master) and not self.destination.holds(master)
        }

    def _weight(self, master: torch.Tensor) -> Weight:
        """The weight of a master; one for all modules that share it."""
        weight = self._weights.get(id(master))
        if weight is None or weight.master is not master:
            weight = self._weights[id(master)] = Weight(master)
        return weight

    def _make_plan(self, states: list[ModuleState]) -> None:
        used = {weight: None for state in states for weight in state.weights.values()}
        size_of = {weight: self.destination.bytes_for(weight.master) for weight in used}
        weights, sizes = list(size_of), list(size_of.values())
        together = max((sum(size_of[w] for w in state.weights.values()) for state in states), default=0)
        residents = choose_residents(sizes, self._budget, together, self._needed_at_once(states, size_of))
        for weight, resident in zip(weights, residents, strict=True):
            weight.resident = resident
            weight.counts.bytes, weight.counts.resident = size_of[weight], resident
        self._counts = dict.fromkeys(weight.counts for weight in weights)
        self._describe()
        self._plan.update(
            groups=len(weights),
            resident_groups=sum(residents),
            weight_bytes=sum(sizes),
            resident_bytes=sum(size for size, resident in zip(sizes, residents, strict=True) if resident),
        )

    def _needed_at_once(self, states: list[ModuleState], size_of: dict[Weight, int]) -> int:
        """The most device bytes that one call is known to need at the same time."""
        modules = {module: state for state in states if (module := state.owner()) is not None}
        together: dict[int, dict[Weight, None]] = {}
        for (unit, at_once), state in zip(self.hooks.units(list(modules)), modules.values(), strict=True):
            if at_once:
                together.setdefault(unit, {}).update(dict.fromkeys(state.weights.values()))
        return max((sum(map(size_of.__getitem__, unit)) for unit in together.values()), default=0)

    # Access -------------------------------------------------------------------------------------------

    def hand_out(
        self, state: ModuleState, name: str, master: torch.Tensor, *, training: bool, graph: bool = False
    ) -> torch.Tensor:
        """The tensor that an access to `name` gets.

        `training`: it is a buffer that may be written; `graph`: it is for a graph of torch.compile.
        """
        if self._closed or self.destination.holds(master):
            if not torch.compiler.is_compiling():
                check_mapped(master)
            return master
        if torch.compiler.is_compiling() or not _is_plain(master):
            converted = self.destination.convert(master)
            if isinstance(master, nn.Parameter):
                converted._is_param = True
            return converted
        with self._exclusive:
            weight = state.weights.get(name)
            if weight is None or weight.master is not master:
                weight = self._weight_now(state, name, master)
            elif state.stand_ins:
                state.stand_ins.pop(name, None)
            for other in weight.overlapping():  # what was written on them is in these bytes, too
                if other.copy is not None:
                    other.copy.write_back(other.master)
            copy = self._current_copy(weight)
            if self._recording:
                self._record_use(weight.counts, self._held_bytes())
            if training and master.is_floating_point():
                copy.compare = True  # F.batch_norm writes its running statistics without a trace
            inside = inside_call()
            if not inside and self.destination.device.type == "cpu":
                copy.compare = True  # NumPy, DLPack and views write to bytes in RAM and bump no version
            if inside and not weight.resident:
                keep(weight, self)
            self._held[id(copy)] = copy
            tensor = copy.tensor(weight)
        return tensor if inside or graph else make_proxy(tensor, master)

    def hand_out_again(self, weight: Weight) -> torch.Tensor:
        """Return what a weight is handed out as, now that its master has other data."""
        with self._exclusive:
            copy = self._current_copy(weight)
            self._held[id(copy)] = copy
            return copy.tensor(weight)

    def fetch_buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        master = module._buffers[name]
        if master is None:
            raise AttributeError(f"the buffer {name!r} of a {type(module).__name__} is None")
        state = module.__dict__[STATE_KEY]
        return self.hand_out(state, name, master, training=module.training, graph=True)

    def fetch_again(self, weight: Weight) -> DeviceCopy:
        """The weight's bytes for a backward pass."""
        with self._exclusive:
            copy = weight.copy
            if copy is None or not copy.current(weight.master):
                copy = self._new_copy(weight)
            if self._recording:
                self._record_use(weight.counts, self._held_bytes())
            return copy

    def _weight_now(self, state: ModuleState, name: str, master: torch.Tensor) -> Weight:
        """The weight of a master that is not the one planned for."""
        new, planned = self._weight(master), state.weights.get(name)
        if planned is not None:
            _take_over(new, planned)
            if sys.getrefcount(planned.master) > 2:  # the weight's own reference, and the call's
                # It may come back, as after functional_call(): what is on the device stays that one's.
                stand_in, since = state.stand_ins.get(name, (None, 0))
                if stand_in is not new:
                    state.stand_ins[name] = new, self._calls
                elif since < self._calls:
                    self.outdated = True  # it has outlasted a call
                return new
            if planned.resident and new.copy is None:
                # The place in the plan stays with the module's name.
                planned.resident, planned.copy = False, None
                new.resident = True
        state.weights[name] = new
        self.outdated = True
        return new

    def _current_copy(self, weight: Weight) -> DeviceCopy:
        copy = weight.copy
        if copy is not None:
            if copy.current(weight.master):
                if copy.written():
                    copy.write_back(weight.master)
                self._count_hit(weight.counts)
                return copy
            copy.write_back(weight.master)  # what only this one has written, where others share its bytes
            weight.copy = copy = None  # the master wins; what was handed out stays as it is
            weight.counts.changed = True
            self._counters["refetches"] += 1
        weight.copy = copy = self._new_copy(weight)
        return copy

    def _new_copy(self, weight: Weight) -> DeviceCopy:
        master = weight.master
        self._collect()
        size = self.destination.bytes_for(master)
        self._make_room(size)
        begin = time.monotonic_ns()
        try:
            copy = DeviceCopy(weight, self, self._freed)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no device memory for {self._name(weight)} ({size} bytes): {error}"
            ) from error
        self._bytes += copy.nbytes
        moved = master.numel() * master.element_size()
        self._count_copy(weight.counts, begin, time.monotonic_ns(), moved)
        self._counters["peak_bytes"] = max(self._counters["peak_bytes"], self._held_bytes())
        return copy

    def _beyond_budget(self, size: int) -> int:
        """Bytes that are too many with `size` more."""
        return 0 if self._budget is None else max(0, self._held_bytes() + size - self._budget)

    def _make_room(self, size: int) -> None:
        """Invariant 4: over budget only where handed-out tensors that somebody keeps leave no room."""
        if not self._beyond_budget(size):
            return
        self._collect_all()
        for other in sorted(self._weights.values(), key=lambda weight: weight.resident):
            if not self._beyond_budget(size):
                return
            if id(other.copy) not in self._held:
                other.kept, other.copy = False, None  # copied again when it is needed, a resident too
        beyond = self._beyond_budget(size)
        if not beyond:
            return
        holders = ", ".join(sorted({self._name(copy.owner()) for copy in self._held.values()})[:5])
        message = (
            f"the budget of {self._budget} bytes is full: tensors handed out from {holders} are kept alive "
            "(by a list, or by an autograd graph)"
        )
        if self._strict:
            needed = self._held_bytes() + size
            raise BudgetError(
                f"{message}, and strict_budget=True does not allow more: drop these tensors, or install "
                f"with a budget of {needed} bytes",
                needed,
            )
        self._counters["overflow_bytes"] = max(self._counters["overflow_bytes"], beyond)
        self._warn_once(
            "overflow",
            f"{message}: more memory than that is used until they are dropped; see overflow_bytes in the "
            "statistics, or pass strict_budget=True to raise instead",
        )


def _take_over(new: Weight, old: Weight) -> None:
    """A weight in another's place goes on with its counts."""
    if new is not old and not new.counts.copied_before:
        new.counts = old.counts
        new.counts.changed = True


def _is_plain(master: torch.Tensor) -> bool:
    """Whether a master's bytes can be copied and compared; others are converted at each access."""
    return (
        type(master) in (torch.Tensor, nn.Parameter)
        and master.layout is torch.strided
        and not master.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(master)
        and not torch._C._are_functorch_transforms_active()
        and not has_tangent(master)
    )
