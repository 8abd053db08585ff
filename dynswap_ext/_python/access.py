"""Hands out weights, from the copy on the device or a new one within the budget (pure-Python provider)."""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import torch
from torch import nn
from torch.autograd import forward_ad

from dynswap_ext._python import saved_hooks
from dynswap_ext._python.attribute import ModuleState
from dynswap_ext._python.calls import inside_call, keep
from dynswap_ext._python.coded_masters import memory_of
from dynswap_ext._python.destination import Destination
from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.held_copies import HeldCopies, drop, exclusive, held
from dynswap_ext._python.mapped_files import check_mapped
from dynswap_ext._swap.parameter_proxy import make_proxy
from dynswap_ext._swap.protocol import Hooks
from dynswap_ext._swap.state import STATE_KEY
from dynswap_ext._swap.subclasses import inner_names, rebuild_subclass
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import exact_bytes
from dynswap_ext.config import Budget, Options
from dynswap_ext.errors import BudgetError, OutOfMemoryError
from dynswap_ext.lossless.tensor import LosslessTensor

#: The types of masters whose bytes can be copied.
_PLAIN: Final = (torch.Tensor, nn.Parameter, LosslessTensor)


class Access(HeldCopies):
    """The part of a session that answers each access to a weight of its modules with a tensor."""

    def __init__(self, options: Options, budget: Budget, hooks: Hooks) -> None:
        super().__init__(hooks)
        device, dtype = self.device, self.dtype = options.device, options.dtype
        self._destination = Destination(device, dtype)
        self._in_float32 = Destination(device, torch.float32, never_narrows=True)
        self._of_late = Destination(device, dtype, never_narrows=True)
        #: For the tensors inside wrapper subclasses, which are not cast.
        self._moved = Destination(device, None)
        self._budget = budget.bytes
        self._strict = options.strict_budget
        self.outdated = False
        #: How often the model has been called.
        self._calls = 0

    def destination_of(self, state: ModuleState, name: str) -> Destination:
        destination: Destination = state.destinations.get(name, self._destination)
        return destination

    def _weight(self, master: torch.Tensor, destination: Destination) -> Weight:
        """Return the weight of a master, the same one for all modules that share it; make it if need be."""
        weight = self._weights.get(id(master))
        if weight is None or weight.master is not master:
            weight = self._weights[id(master)] = Weight(master, destination)
        return weight

    def hand_out(
        self, state: ModuleState, name: str, master: torch.Tensor, *, training: bool, graph: bool = False
    ) -> torch.Tensor:
        """Return the tensor that an access to `name` gets.

        `training`: `name` is a buffer of a module in training, so a forward may write it. `graph`: the tensor
        is for a graph of torch.compile.
        """
        destination: Destination = state.destinations.get(name, self._destination)
        traced = torch.compiler.is_compiling() and not graph
        inside = inside_call()
        known, tensor = state.weights.get(name), None
        if (
            known is not None
            and known.master is master
            and known.copy is not None
            and known.copy.destination is destination
            and type(master) in _PLAIN
            and not (traced or torch._C._are_functorch_transforms_active())
        ):
            # When the master was copied, it was plain and not yet at its destination. As long as it has not
            # changed, neither has to be checked again.
            tensor = self._hand_out(state, name, master, training=training, inside=inside, may_copy=False)
        if tensor is None:
            if destination.holds(master):
                if not torch.compiler.is_compiling():
                    check_mapped(master)
                return master
            if traced or not is_plain(master):
                converted = self._converted(state, name, master, destination)
                if isinstance(master, nn.Parameter):
                    converted._is_param = True
                return converted
            tensor = self._hand_out(state, name, master, training=training, inside=inside, may_copy=True)
        if tensor is None:  # another session, or none, serves the module by now
            module = state.owner()
            now = None if module is None else module.__dict__.get(STATE_KEY)
            if now is None:
                return master
            served: torch.Tensor = now.session.fetch_buffer(module, name) if graph else getattr(module, name)
            return served
        return tensor if graph or inside else make_proxy(tensor, master)

    def _hand_out(
        self,
        state: ModuleState,
        name: str,
        master: torch.Tensor,
        *,
        training: bool,
        inside: bool,
        may_copy: bool,
    ) -> torch.Tensor | None:
        """Return the tensor on the device for a master whose bytes can be copied.

        None if the module has another state by now. Also None if there is no copy of the master's present
        bytes and `may_copy` is False.
        """
        with exclusive:
            if not state.in_effect():
                return None
            weight = state.weights.get(name)
            if weight is None or weight.master is not master or state.stand_ins:
                weight = self._weight_now(state, name, master)
            copy = self._present_copy(weight)
            if copy is None and may_copy:
                copy = self._new_copy(weight)
            return None if copy is None else self._use(copy, weight, training=training, inside=inside)

    def _use(self, copy: DeviceCopy, weight: Weight, *, training: bool, inside: bool) -> torch.Tensor:
        """Return the tensor that an access gets from a weight's present copy, and note the use."""
        if self._recording:
            self._record_use(weight.counts, self._bytes())
        if inside:
            saved_hooks.stand_over_others()
            if not weight.resident:
                keep(weight, copy)
        elif self.device.type == "cpu":
            copy.compare = True  # NumPy, DLPack and views write to bytes in RAM and bump no version
        if training and weight.master.is_floating_point():
            copy.compare = True  # F.batch_norm writes its running statistics and bumps no version
        held[copy] = None
        copy.reader = threading.get_ident()
        return copy.tensor(weight)

    def _converted(
        self, state: ModuleState, name: str, master: torch.Tensor, destination: Destination
    ) -> torch.Tensor:
        """Return a master that has no copy of its own on the device, converted for this access.

        A wrapper subclass becomes a new wrapper around copies of the tensors inside it (Note [Subclasses are
        taken apart]). Other masters are converted by torch.
        """
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        in_graph = master.requires_grad and torch.is_grad_enabled()
        apart = not (traced or in_graph or isinstance(master, LosslessTensor))
        names = inner_names(master) if apart else None
        inner = None if names is None else self._inner(state, name, master, names)
        if inner is None:
            return self.hooks.convert(master, destination.device, destination.dtype_for(master))
        return rebuild_subclass(master, inner, self.device, destination.dtype_for(master))[0]

    def _inner(
        self, state: ModuleState, name: str, master: torch.Tensor, names: list[str]
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors inside a wrapper, on the device; None if the module has another state by now."""
        inner: dict[str, torch.Tensor] = {}
        weights: dict[str, Weight] = {}
        with exclusive:
            if not state.in_effect():
                return None
            for part in names:
                tensor: torch.Tensor = getattr(master, part)
                if self._moved.holds(tensor) or not is_plain(tensor):
                    inner[part] = self._moved.convert(tensor)
                else:
                    weight = weights[part] = self._weight(tensor, self._moved)
                    copy = self._current_copy(weight)
                    inner[part] = self._use(copy, weight, training=False, inside=inside_call())
            state.inner[name] = weights  # the state keeps them alive: the session refers to them weakly
        return inner

    def hand_out_again(self, weight: Weight) -> torch.Tensor:
        """Return the tensor to hand out for a weight whose master was given other data."""
        with exclusive:
            return self._use(self._current_copy(weight), weight, training=False, inside=inside_call())

    def fetch_buffer(self, module: nn.Module, name: str) -> torch.Tensor:
        master = module._buffers.get(name)
        if master is None:
            raise AttributeError(f"a {type(module).__name__} has no tensor as its buffer {name!r}")
        state = module.__dict__[STATE_KEY]
        return self.hand_out(state, name, master, training=module.training, graph=True)

    def fetch_again(self, weight: Weight) -> DeviceCopy:
        """Return a copy of a weight for a backward pass: the present one, or a new one that is not kept."""
        with exclusive:
            copy = weight.copy
            if copy is None or not copy.current(weight.master):
                copy = self._new_copy(weight)
                drop(copy)  # its memory is freed with the tensor that backward gets
            if self._recording:
                self._record_use(weight.counts, self._bytes())
            return copy

    def _weight_now(self, state: ModuleState, name: str, master: torch.Tensor) -> Weight:
        """Return the weight of a module's present master, which may differ from the one in the plan."""
        planned = state.weights.get(name)
        if planned is not None and planned.master is master:
            state.stand_ins.pop(name, None)
            return planned
        new = self._weight(master, self.destination_of(state, name))
        if planned is not None:
            take_over(new, planned)
            if sys.getrefcount(planned.master) > 2:  # the weight's own reference, and the call's
                # The planned master may come back, as after functional_call(), so it keeps its copy.
                stand_in, since = state.stand_ins.get(name, (None, 0))
                if stand_in is not new:
                    state.stand_ins[name] = new, self._calls
                elif since < self._calls:
                    self.outdated = True  # the new master has outlasted a call
                return new
        state.weights[name] = new
        self.outdated = True
        return new

    def _current_copy(self, weight: Weight) -> DeviceCopy:
        return self._present_copy(weight) or self._new_copy(weight)

    def _present_copy(self, weight: Weight) -> DeviceCopy | None:
        """Return a weight's copy; None if it has none, or if its master has changed since the copy."""
        copy = weight.copy
        if copy is None:
            return None
        if copy.before is not None:
            for other in copy.neighbours():
                other.be_kept_apart()  # what was written on it belongs to these bytes, too
        current = copy.current(weight.master)
        if copy.written() or not current:
            copy.write_back(weight)  # the master wins, except for shared bytes that only this one has written
        if current:
            self._count_hit(weight.counts)
            return copy
        weight.copy = None  # tensors that were handed out stay as they are
        weight.counts.changed = True
        self._counters["refetches"] += 1
        return None

    def _new_copy(self, weight: Weight) -> DeviceCopy:
        """Copy a weight's master to the device, within the budget if possible. The weight gets the copy."""
        master = weight.master
        self._collect()
        to_plan = weight.to_plan()
        size = to_plan or weight.destination.bytes_for(master)
        weight.resident &= to_plan > 0
        self.outdated |= weight.planned not in (None, to_plan)
        self._make_room(size)
        begin = time.monotonic_ns()
        try:
            copy = weight.copy = DeviceCopy(weight, self)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no device memory for {self._name(weight)}, {exact_bytes(size)}: {error}"
            ) from error
        read = memory_of(master).nbytes if type(master) is LosslessTensor else master.nbytes
        self._count_copy(weight.counts, begin, time.monotonic_ns(), read, master.nbytes)
        self._counters["peak_bytes"] = max(self._counters["peak_bytes"], self._bytes())
        return copy

    def _beyond_budget(self, size: int) -> int:
        """Return by how many bytes another `size` bytes would exceed the budget."""
        return 0 if self._budget is None else max(0, self._bytes() + size - self._budget)

    def _make_room(self, size: int) -> None:
        """Free memory for `size` bytes within the budget.

        If handed-out tensors that the program keeps leave no room, exceed the budget or raise BudgetError:
        Invariant 4.
        """
        beyond = self._beyond_budget(size)
        for weight in sorted(self._weights.values(), key=lambda weight: weight.resident) if beyond else ():
            if beyond and self._forget(weight):
                beyond = self._beyond_budget(size)
        if not beyond:
            return
        copies = self._held()
        holders = listed(sorted({self._name(copy.owner()) for copy in copies}))
        threads = len({threading.get_ident(), *(copy.reader for copy in copies)})
        by = f"{threads} threads at the same time" if threads > 1 else "a list, or by an autograd graph"
        message = (
            f"the budget of {exact_bytes(self._budget or 0)} is full: tensors handed out from {holders} are "
            f"kept alive (by {by})"
        )
        needed = self._bytes() + size
        remedy = f"install with a budget of {exact_bytes(needed)} or more"
        if self._strict:
            raise BudgetError(
                f"{message}, and strict_budget=True does not allow more: drop these tensors, or {remedy}",
                needed,
            )
        self._counters["overflow_bytes"] = max(self._counters["overflow_bytes"], beyond)
        self._warn_once(
            "overflow",
            f"{message}: more memory than that is used until they are dropped (overflow_bytes in the "
            f"statistics). To avoid that, {remedy}; or pass strict_budget=True to raise instead",
        )


def _is_expanded(master: torch.Tensor) -> bool:
    """Return whether elements share memory. Writes on a copy could not be brought back to such a master."""
    return any(not step and size > 1 for step, size in zip(master.stride(), master.shape, strict=True))


def take_over(new: Weight, old: Weight) -> None:
    """Give a weight that has not been copied yet the counters of the weight whose place it takes."""
    if new is not old and not new.counts.copied_before:
        new.counts = old.counts
        new.counts.changed = True


def is_plain(master: torch.Tensor) -> bool:
    """Return whether a master's bytes can be copied and compared. Others are converted at each access."""
    if type(master) is LosslessTensor:
        master.make_plain_unless_range()
    return (
        type(master) in _PLAIN
        and (type(master) is not LosslessTensor or master.coded is None or master.is_range())
        and master.is_cpu
        and master.numel() > 0
        and master.layout is torch.strided
        and not (master.is_quantized or master.is_nested or master._is_zerotensor())
        and not (0 in master.stride() and _is_expanded(master))
        and not torch._C._functorch.is_functorch_wrapped_tensor(master)
        and not torch._C._are_functorch_transforms_active()
        and not _has_tangent(master)
    )


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dual number of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    dual = forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return dual.tangent is not None
