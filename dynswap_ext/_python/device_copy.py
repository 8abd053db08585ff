"""One weight's bytes on the device, and the tensors handed out from them (pure-Python provider).

A handed-out tensor is an alias of `DeviceCopy.data` that stands in the autograd graph of its master. Both
share one version counter, so what is written in place on the tensor shows in `DeviceCopy.data`, also after
the tensor itself is gone.
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
from dynswap_ext._python.destination import Destination, lies_as_copy
from dynswap_ext._python.mapped_files import check_mapped, span
from dynswap_ext._python.master_state import MasterState, NotedWrites
from dynswap_ext._python.statistics import Counts
from dynswap_ext._python.storage_owners import storage_address
from dynswap_ext._swap.changed_elements import changed_elements, with_changes
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced

#: The sequence number that torch gives AccumulateGrad.
_AT_ONCE: Final = 2**64 - 1


class Weight:
    """One managed master. Modules that share it share the weight."""

    def __init__(self, master: torch.Tensor, destination: Destination) -> None:
        self.counts = Counts()
        self.destination = destination
        #: Not weakly: torch swaps no tensor that somebody refers to weakly (`torch.utils.swap_tensors`).
        self.master = master
        self.resident = False
        #: The device bytes for which it has a place in the plan, 0 if it lies as no copy does; None: no plan
        #: has looked at it.
        self.planned: int | None = None
        #: Invariant: what the next access hands out, if the master is still what it was then.
        self.copy: DeviceCopy | None = None
        self.noted = NotedWrites()
        #: What handed-out tensors are results of, for as long as some graph has it.
        self.fetched: weakref.ref[torch.Tensor] | None = None

    def to_plan(self) -> int:
        """Return the device bytes for which a plan has to give it a place; 0: it has none."""
        return self.destination.bytes_for(self.master) if lies_as_copy(self.master) else 0

    def connected(self, copy: DeviceCopy) -> torch.Tensor:
        """Return an alias of the weight's bytes on the device, in the graph of the master."""
        if copy.in_call is not None and copy.in_call[1].variable is self.master:
            return alias(copy.in_call[0], copy.data)
        copy.in_call = None  # before it is made anew: it has what has the master's old shape
        fetched = None if self.fetched is None else self.fetched()
        if fetched is None or not is_fetched(fetched, self.master, copy.data):
            fetched = fetch(self.master, copy.data, self.noted)
            node: Any = fetched.grad_fn
            # It runs as soon as it can, like AccumulateGrad. An earlier graph may have it too: then it would
            # run last, and gradients would pile up on the device until the end of the backward pass.
            node._set_sequence_nr(_AT_ONCE)
            self.fetched = weakref.ref(fetched)
            # Not at the first read, with which most modules have all that they want of it: what is kept keeps
            # the master's AccumulateGrad, whose shape stays what it is now.
            if copy.asked_again and self.master.is_leaf:
                copy.in_call = fetched, node.next_functions[0][0]
        return alias(fetched, copy.data)


class DeviceCopy:
    """A weight's bytes on the device."""

    def __init__(self, weight: Weight, session: Any) -> None:
        #: Weakly, as the weight has its current copy; and no master, as what hangs on one may lead to its
        #: model: a model is freed with its last reference, whoever still has its copies.
        self.owner = weakref.ref(weight)
        self.session = session
        self.destination = weight.destination
        self._noted = weight.noted
        master = weight.master
        check_mapped(master)
        self._storage, begin = storage_address(master), master.data_ptr()
        self._range = begin, begin + span(master)
        neighbours = self.neighbours()
        for other in neighbours:
            other.be_kept_apart()
        self._of = MasterState(master, self._noted)
        #: What was copied, where versions do not tell who has written: others have some of the master's
        #: bytes, or somebody has taken `.data`. What differs from it was written here.
        self.before: torch.Tensor | None = None
        if neighbours or master.untyped_storage().nbytes() != master.nbytes:
            self.before = self._as_master(weight, master)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            self.data: torch.Tensor = self.destination.convert(master.detach())
        #: The streams that were given the bytes, which the first one has copied; none where there are none.
        self.streams = [] if self.data.is_cpu else [torch.accelerator.current_stream(self.data.device)]
        self.nbytes = self.data.untyped_storage().nbytes()
        #: The tensor that was handed out last, if it was not seen to die, and whether it has a graph.
        self.handed: weakref.ref[torch.Tensor] | None = None
        self._note_death = functools.partial(_died, weakref.ref(self))
        self.requires_grad = False
        #: The thread to which that was.
        self.reader = threading.get_ident()
        #: Whether writes may have happened that no version counter shows.
        self.compare = False
        self.version: int = self.data._version
        #: Whether the running module may ask for it again, and whether it has. Then what its reads are
        #: results of, and the master's node, AccumulateGrad.
        self.kept = self.asked_again = False
        self.in_call: tuple[torch.Tensor, Any] | None = None
        #: Of the bytes' storage.
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
        """The copies of other weights of which the masters may have some of this one's bytes."""
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
        """Take what was written to the master, and keep what that has: no version will tell who writes."""
        weight = self.owner()
        if weight is not None:
            self.write_back(weight)
            if self.before is None:
                copied = weight.master if self.unchanged(weight.master) else self.data
                self.before = self._as_master(weight, copied)

    def _as_master(self, weight: Weight, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of the values on the device and in the dtype of the master."""
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            return values.detach().to(weight.master.device, weight.master.dtype, copy=True)

    def untracked_alias_made(self) -> None:
        """Note that somebody may write to the bytes, and no version tells of it."""
        self.be_kept_apart()
        self.compare = True

    def current(self, master: torch.Tensor) -> bool:
        """Whether the master is still what was copied (Invariant 6). An inference tensor has no version."""
        return self._of.has_version and (self._of.is_of(master) or self.unchanged(master))

    def unchanged(self, master: torch.Tensor) -> bool:
        """Whether no change of the master since the copy is known.

        The version of one that shares its storage tells of others' writes, too.
        """
        if self._of.is_of(master):
            return True
        if self.before is None or not self._of.lies_as(master):
            return False
        now = MasterState(master, self._noted)
        with unseen_by_modes():
            if bool(changed_elements(master.detach(), self.before).any()):
                return False
        self._of = now
        return True

    def tensor(self, weight: Weight) -> torch.Tensor:
        """The tensor to hand out: the one that is alive, if there is one."""
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
            if current not in self.streams:  # it waits for the copy, and the memory for it (Invariants 1, 2)
                current.wait_stream(self.streams[0])
                self.data.record_stream(current)
                self.streams.append(current)
        return alive

    def written(self) -> bool:
        """Whether a handed-out tensor, or its `.data`, was written since the two sides were equal."""
        if self.data._version != self.version:
            return True
        if not self.compare or self.before is None:
            return False
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            return bool(changed_elements(self.data, self.destination.convert(self.before)).any())

    def write_back(self, weight: Weight) -> bool:
        """Bring what was written on the device to the master; True if it was any.

        Only elements that differ are written: the others keep the master's precision. If the master has
        changed since, those are written that it still has as they were copied, where `before` tells. What was
        written on both sides is lost here, which is told once: see Note [Two writes, one weight].
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
        for stream in self.streams:  # whoever may have written the bytes
            torch.accelerator.current_stream(self.data.device).wait_stream(stream)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            now = master.detach()
            copied = now if self.before is None else self.before
            taken = self.data.to(device=now.device, dtype=now.dtype)
            changed = changed_elements(self.data, self.destination.convert(copied)).to(master.device)
            # What the master rounds is in it by now: each further look would find it, and write it again. Not
            # `&=`: one of the two may be functorch's, and then cannot be written to the other.
            changed = changed & changed_elements(taken, now)
            any_changed = bool(changed.any())
            if any_changed:
                by_others = changed_elements(now, copied)
                if bool((changed & by_others).any()):
                    self.session.tell_lost(weight)
                written = torch.where(changed & ~by_others, taken, now)
                with torch.inference_mode(master.is_inference()):
                    master.detach().copy_(written)
                if self.before is not None:
                    for other in self.neighbours():  # whose masters may have versions of their own
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


#: All of them, by the address of their storage, which lives as long as they do.
copies: weakref.WeakValueDictionary[int, DeviceCopy] = weakref.WeakValueDictionary()
