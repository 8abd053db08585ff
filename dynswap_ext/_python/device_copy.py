"""One weight's bytes on the device, and the tensors handed out from them (pure-Python provider).

A handed-out tensor is an alias of `DeviceCopy.data` that is part of the autograd graph of the master. Both
share one version counter, so a write in place on the tensor shows in `DeviceCopy.data`, even after the tensor
itself is gone.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._python.autograd import alias, fetch, is_fetched
from dynswap_ext._python.coded_masters import place_of, values_of
from dynswap_ext._python.destination import Destination, lies_as_copy
from dynswap_ext._python.mapped_files import check_mapped, span
from dynswap_ext._python.master_state import MasterState, NotedWrites
from dynswap_ext._python.statistics import Counts
from dynswap_ext._python.storage_owners import storage_address
from dynswap_ext._swap.changed_elements import changed_elements, with_changes
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced
from dynswap_ext.lossless.tensor import LosslessTensor

#: The sequence number that torch gives AccumulateGrad.
_AT_ONCE: Final = 2**64 - 1


class Weight:
    """A managed master and its copy on the device, if any. Modules that share the master share the weight."""

    def __init__(self, master: torch.Tensor, destination: Destination) -> None:
        self.counts = Counts()
        self.destination = destination
        #: Not a weak reference, because `torch.utils.swap_tensors` refuses tensors that have one.
        self.master = master
        self.resident = False
        #: What `to_plan` returned when a plan was made; None: no plan includes the weight.
        self.planned: int | None = None
        #: Invariant: the next access hands this copy out, if the master has not changed since it was made.
        self.copy: DeviceCopy | None = None
        self.noted = NotedWrites()
        #: The output of `Fetch` that handed-out tensors are computed from, as long as a graph has it.
        self.fetched: weakref.ref[torch.Tensor] | None = None

    def to_plan(self) -> int:
        """Return the device bytes that a plan counts for the weight; 0 if its copy never stays there."""
        return self.destination.bytes_for(self.master) if lies_as_copy(self.master) else 0

    def connected(self, copy: DeviceCopy) -> torch.Tensor:
        """Return an alias of a copy's bytes that is part of the master's autograd graph."""
        if copy.in_call is not None and copy.in_call[1].variable is self.master:
            return alias(copy.in_call[0], copy.data)
        copy.in_call = None  # it holds a node that has the master's old shape
        fetched = None if self.fetched is None else self.fetched()
        if fetched is None or not is_fetched(fetched, self.master, copy.data):
            fetched = fetch(self.master, copy.data, self.noted)
            node: Any = fetched.grad_fn
            # The node is to run as soon as it can, like AccumulateGrad. With a sequence number of its own, a
            # node that an earlier graph has too would run last, and gradients would pile up on the device.
            node._set_sequence_nr(_AT_ONCE)
            self.fetched = weakref.ref(fetched)
            # Kept from the second read on, because most modules read a weight once. What is kept holds the
            # master's AccumulateGrad, which keeps its present shape even if the master gets another.
            if copy.asked_again and self.master.is_leaf:
                copy.in_call = fetched, node.next_functions[0][0]
        return alias(fetched, copy.data)


class DeviceCopy:
    """A weight's bytes on the device, as they were copied at one time, and who uses them."""

    def __init__(self, weight: Weight, session: Any) -> None:
        #: The weight, by a weak reference, because the weight owns its current copy. A copy owns no master
        #: either: a master may lead to its model, which is to be freed even while copies of it are in use.
        self.owner = weakref.ref(weight)
        self.session = session
        self.destination = weight.destination
        self._noted = weight.noted
        master = weight.master
        check_mapped(master)
        lossless = master if type(master) is LosslessTensor else None
        if lossless is None:
            self._storage, begin = storage_address(master), master.data_ptr()
        else:
            self._storage, begin = place_of(lossless)
        self._range = begin, begin + span(master)
        neighbours = self.neighbours()
        for other in neighbours:
            other.be_kept_apart()
        self._of = MasterState(master, self._noted)
        #: The master's values when both sides were last equal. Elements of `data` that differ from them were
        #: written here. Kept only where versions do not tell who has written: if other tensors share the
        #: master's memory, or if an alias was made by `.data`; and if the master is coded.
        self.before: torch.Tensor | None = None
        coded = lossless is not None and lossless.coded is not None
        if neighbours or coded or master.untyped_storage().nbytes() != master.nbytes:
            self.before = self._as_master(weight, master)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            shown = master.detach()
            if lossless is not None:
                shown = values_of(shown).data  # a view's base would count as a holder
            self.data: torch.Tensor = self.destination.convert(shown)
            if lossless is not None and storage_address(self.data) == storage_address(master):
                self.data = self.data.clone()  # another thread has made a coded master plain
        #: The streams that use the bytes. The first one has copied them. Empty on the CPU.
        self.streams = [] if self.data.is_cpu else [torch.accelerator.current_stream(self.data.device)]
        self.nbytes = self.data.untyped_storage().nbytes()
        #: The tensor that was handed out last, unless its death was noted, and whether it has a graph.
        self.handed: weakref.ref[torch.Tensor] | None = None
        self._note_death = functools.partial(_died, weakref.ref(self))
        self.requires_grad = False
        #: The thread that read the weight last.
        self.reader = threading.get_ident()
        #: Whether writes may have happened that no version counter shows.
        self.compare = False
        #: The version of `data` when both sides were last equal.
        self.version: int = self.data._version
        #: Whether the copy stays for the module that runs, and whether the module has read it again.
        self.kept = self.asked_again = False
        #: For such a module: the output of `Fetch`, and the master's node AccumulateGrad.
        self.in_call: tuple[torch.Tensor, Any] | None = None
        #: Identifies the storage of `data`, as `storage_address` does.
        self.address = storage_address(self.data)
        copies[self.address] = self

    @property
    def weight(self) -> Weight | None:
        """The weight whose current copy this is; None if the weight has another copy by now."""
        weight = self.owner()
        return weight if weight is not None and weight.copy is self else None

    def let_go(self) -> None:
        """Forget that the running module uses the copy, and the tensor that its reads share."""
        self.kept = self.asked_again = False
        self.in_call = None

    def neighbours(self) -> list[DeviceCopy]:
        """Return the copies of other weights whose masters may share bytes with the master of this one."""
        begin, end = self._range
        return [
            other
            for other in list(copies.values())
            if other._storage == self._storage
            and other.owner() is not self.owner()
            and other._range[0] < end
            and begin < other._range[1]
        ]

    def be_kept_apart(self) -> None:
        """Write changes back to the master, and keep a copy of its values in `before`.

        From now on the values tell what is written here. The master's version does not, because other tensors
        may write to the same memory.
        """
        weight = self.owner()
        if weight is not None:
            self.write_back(weight)
            if self.before is None:
                copied = weight.master if self.unchanged(weight.master) else self.data
                self.before = self._as_master(weight, copied)

    def _as_master(self, weight: Weight, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values, on the device and in the dtype of a weight's master."""
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            return values.detach().to(weight.master.device, weight.master.dtype, copy=True)

    def untracked_alias_made(self) -> None:
        """Note that an alias of the bytes was made, on which writes do not bump their version."""
        self.be_kept_apart()
        self.compare = True

    def current(self, master: torch.Tensor) -> bool:
        """Return whether the master is known to have the values that were copied (Invariant 6).

        Always False for an inference tensor, which has no version.
        """
        return self._of.has_version and (self._of.is_of(master) or self.unchanged(master))

    def unchanged(self, master: torch.Tensor) -> bool:
        """Return whether no change of the master since the copy is known.

        If other tensors share its memory, their writes bump its version, too. So its values are compared.
        """
        if self._of.is_of(master):
            return True
        if self.before is None or not self._of.lies_as(master):
            return False
        now = MasterState(master, self._noted)
        with unseen_by_modes():
            if bool(changed_elements(values_of(master.detach()), values_of(self.before)).any()):
                return False
        self._of = now
        return True

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Return the tensor to hand out: the last one if it is still alive, else a new one."""
        connected = weight.master.requires_grad
        alive = None if self.handed is None or self.requires_grad != connected else self.handed()
        if alive is None:
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                alive = weight.connected(self) if connected else self.data.detach()
            else:
                with torch.inference_mode(False), torch.enable_grad():
                    alive = weight.connected(self) if connected else self.data.detach()
            if isinstance(weight.master, nn.Parameter):
                alive._is_param = True
            self.handed = weakref.ref(alive, self._note_death)
            self.requires_grad = connected
        if self.streams:
            current = torch.accelerator.current_stream(self.data.device)
            # This stream has to wait for the copy, and the memory's reuse for this stream (Invariants 1, 2).
            if current not in self.streams:
                current.wait_stream(self.streams[0])
                self.data.record_stream(current)
                self.streams.append(current)
        return alive

    def written(self) -> bool:
        """Return whether the bytes on the device are known to be written since they equalled the master's.

        Writes that bump no version are only seen while `before` is kept.
        """
        if self.data._version != self.version:
            return True
        if not self.compare or self.before is None:
            return False
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            return bool(changed_elements(self.data, self.destination.convert(values_of(self.before))).any())

    def write_back(self, weight: Weight) -> bool:
        """Write to the master what was written on the device. Return whether there was anything to write.

        Only elements that were written change, so the others keep the master's precision. If the master has
        changed too, the elements that have changed there stay. `before` tells which they are; without it,
        nothing is written. The user is warned of writes that are lost: Note [Two writes, one weight].
        """
        if not self.compare and not self.written():
            return False
        master = weight.master
        current = self.unchanged(master)
        apart = self.before is not None and self._of.lies_as(master)
        if not apart and not (current and weight.copy is self):
            if not current and self.written():
                self.version = self.data._version
                self.session.tell_lost(weight)
            return False
        for stream in self.streams:  # those that may have written the bytes
            torch.accelerator.current_stream(self.data.device).wait_stream(stream)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            now = values_of(master.detach())
            copied = now if self.before is None else values_of(self.before)
            taken = self.data.to(device=now.device, dtype=now.dtype)
            changed = changed_elements(self.data, self.destination.convert(copied)).to(master.device)
            # A value that the master's dtype rounds still differs after it was written back, and would be
            # written each time. Not `&=`: a mask of functorch's tensors cannot be written to a plain one.
            changed = changed & changed_elements(taken, now)
            any_changed = bool(changed.any())
            if any_changed:
                by_others = changed_elements(now, copied)
                if bool((changed & by_others).any()):
                    self.session.tell_lost(weight)
                written = torch.where(changed & ~by_others, taken, now)
                with torch.inference_mode(master.is_inference()):
                    master.detach().copy_(written)
                now = values_of(master.detach())
                if self.before is not None:
                    for other in self.neighbours():  # their masters may have other version counters
                        other._noted.count += 1
                    differs = changed_elements(self.data, self.destination.convert(now))
                    self.before = with_changes(now, self.data, differs)
        if current:
            self.version = self.data._version
            self._of = MasterState(master, self._noted)
        return any_changed


@untraced
def _died(made: weakref.ref[DeviceCopy], _: object) -> None:
    copy = made()
    if copy is not None and not sys.is_finalizing():
        copy.session.note_death(copy)


#: All copies on devices, by `DeviceCopy.address`. It is unique, as the storage lives as long as the copy.
copies: weakref.WeakValueDictionary[int, DeviceCopy] = weakref.WeakValueDictionary()
