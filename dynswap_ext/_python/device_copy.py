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
from collections import deque
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dynswap_ext._python.autograd import alias, fetch, is_fetched
from dynswap_ext._python.destination import Destination, lies_as_copy
from dynswap_ext._python.mapped_files import check_mapped, span
from dynswap_ext._python.master_state import MasterState, NotedWrites
from dynswap_ext._python.statistics import Counts
from dynswap_ext._python.storage_owners import (
    has_aliases,
    has_more_than_a_dying_alias,
    storage_address,
)
from dynswap_ext._swap.changed_elements import bits, changed_elements, with_changes
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced

#: The sequence number that torch gives AccumulateGrad.
_AT_ONCE: Final = 2**64 - 1


class _InCall(NamedTuple):
    """The fetch of a weight, for its reads by a module that is running: all are results of this one."""

    fetched: torch.Tensor
    #: The master's node, AccumulateGrad.
    accumulates: Any
    copy: weakref.ref[DeviceCopy]


class Weight:
    """One managed master. Modules that share it share the weight."""

    __slots__ = (
        "__weakref__",
        "_fetched",
        "_in_call",
        "asked_again",
        "copy",
        "counts",
        "destination",
        "kept",
        "master",
        "noted",
        "planned",
        "resident",
    )

    def __init__(self, master: torch.Tensor, destination: Destination) -> None:
        self.counts = Counts()
        self.destination = destination
        #: Not weakly: torch swaps no tensor that somebody refers to weakly (`torch.utils.swap_tensors`).
        self.master = master
        self.resident = False
        #: The device bytes for which it has a place in the plan, 0 if it lies as no copy does; None: no plan
        #: has looked at it.
        self.planned: int | None = None
        #: Whether the running module may ask for it again.
        self.kept = False
        #: Invariant: what the next access hands out, if the master is still what it was then.
        self.copy: DeviceCopy | None = None
        self.noted = NotedWrites()
        #: What handed-out tensors are results of, for as long as some graph has it.
        self._fetched: weakref.ref[torch.Tensor] | None = None
        #: Whether the running module has asked for it before, and what its reads are then results of.
        self.asked_again = False
        self._in_call: _InCall | None = None

    def to_plan(self) -> int:
        """Return the device bytes for which a plan has to give it a place; 0: it has none."""
        return self.destination.bytes_for(self.master) if lies_as_copy(self.master) else 0

    def let_go(self) -> None:
        """Note that the running module's call is over: the next one reads anew."""
        self.kept = self.asked_again = False
        self._in_call = None

    def follow(self, earlier: Weight) -> None:
        """Take the place of another session's weight: graphs lead to what was handed out of that."""
        self._fetched, self.noted = earlier._fetched, earlier.noted

    def connected(self, copy: DeviceCopy) -> torch.Tensor:
        """Return an alias of the weight's bytes on the device, in the graph of the master."""
        in_call, data = self._in_call, copy.data
        if in_call is not None and in_call.copy() is copy and in_call.accumulates.variable is self.master:
            return alias(in_call.fetched, data)
        in_call = self._in_call = None  # before it is made anew: it has what has the master's old shape
        fetched = None if self._fetched is None else self._fetched()
        if fetched is None or not is_fetched(fetched, self.master, data):
            fetched = fetch(self.master, data, self.noted)
            node: Any = fetched.grad_fn
            # It runs as soon as it can, like AccumulateGrad. An earlier graph may have it too: then it would
            # run last, and gradients would pile up on the device until the end of the backward pass.
            node._set_sequence_nr(_AT_ONCE)
            self._fetched = weakref.ref(fetched)
            # Not at the first read, with which most modules have all that they want of it: what is kept keeps
            # the master's AccumulateGrad, whose shape stays what it is now.
            if self.asked_again and self.master.is_leaf:
                self._in_call = _InCall(fetched, node.next_functions[0][0], weakref.ref(copy))
        return alias(fetched, data)


class _SharedStorage:
    """A storage with masters in it, and the copies that have been made of them."""

    __slots__ = ("__weakref__", "copies", "guard")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        #: Keeps the storage's address from being given to another.
        self.guard = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.copies: weakref.WeakSet[DeviceCopy] = weakref.WeakSet()

    @classmethod
    def of(cls, master: torch.Tensor) -> _SharedStorage:
        """Return what is known of a master's storage, for as long as somebody has it."""
        storage = master.untyped_storage()
        known = _storages.get(storage._cdata)
        if known is None:
            known = _storages[storage._cdata] = cls(storage)
        return known


#: By their addresses.
_storages: weakref.WeakValueDictionary[int, _SharedStorage] = weakref.WeakValueDictionary()


class DeviceCopy:
    """A weight's bytes on the device."""

    def __init__(self, weight: Weight, session: Any, freed: deque[int]) -> None:
        #: Weakly, as the weight has its current copy; and no master, as what hangs on one may lead to its
        #: model: a model is freed with its last reference, whoever still has its copies.
        self.owner = weakref.ref(weight)
        self.session = weakref.ref(session)
        self.destination = weight.destination
        self._noted = weight.noted
        master = weight.master
        check_mapped(master)
        self._range = master.data_ptr(), master.data_ptr() + span(master)
        self._storage = _SharedStorage.of(master)
        neighbours = self.neighbours()
        for other in neighbours:
            other.be_kept_apart()
        self._of = MasterState(master, self._noted)
        #: What was copied, where others may write to the storage: what differs was written here.
        self.before: torch.Tensor | None = None
        if neighbours or master.untyped_storage().nbytes() != master.nbytes:
            self.before = _cloned(master)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            self.data: torch.Tensor = self.destination.convert(master.detach())
        self._storage.copies.add(self)
        self.stream = _current_stream(self.destination.device)
        #: Other streams that were given the bytes.
        self.users: list[Any] = []
        self.nbytes = self.data.untyped_storage().nbytes()
        self.freed = freed
        #: The tensor that was handed out last, if it was not seen to die, and whether it has a graph.
        self.handed: weakref.ref[torch.Tensor] | None = None
        self._note_death = functools.partial(_died, weakref.ref(self))
        self.requires_grad = False
        #: The thread to which that was.
        self.reader = threading.get_ident()
        #: Whether writes may have happened that no version counter shows.
        self.compare = False
        #: Tells of most such writes, and is known if somebody has taken `.data` outside a forward.
        self._sum: int | None = None
        self._note_versions()
        #: Of the bytes' storage.
        self.address = storage_address(self.data)
        copies[self.address] = self

    def __del__(self) -> None:
        try:  # noqa: SIM105  (at the interpreter's end this module's names may be gone)
            self.freed.append(self.nbytes)
        except AttributeError:  # never made: out of memory
            pass

    @property
    def weight(self) -> Weight | None:
        """The weight whose current copy this is; None if the weight has another copy by now."""
        weight = self.owner()
        return weight if weight is not None and weight.copy is self else None

    def neighbours(self) -> list[DeviceCopy]:
        """The copies of other weights of which the masters may have some of this one's bytes."""
        begin, end = self._range
        return [
            other
            for other in list(self._storage.copies)
            if other.owner() is not self.owner() and other._range[0] < end and begin < other._range[1]
        ]

    def be_kept_apart(self) -> None:
        """Take what was written to the master, and keep what that has: others will have some of its bytes."""
        weight = self.owner()
        if weight is not None:
            self.write_back(weight.master)
            if self.before is None and self.unchanged(weight.master):
                self.before = _cloned(weight.master)

    def _note_versions(self) -> None:
        self.version: int = self.data._version
        self._sum = None if self._sum is None else self._bits_sum()

    def _bits_sum(self) -> int:
        with unseen_by_modes():
            return int(bits(self.data).sum(dtype=torch.int64))

    def untracked_alias_made(self) -> None:
        """Note that somebody may write to the bytes, and that a sum of them tells of it."""
        self.compare = True
        if self._sum is None:
            self._sum = self._bits_sum()

    def current(self, master: torch.Tensor) -> bool:
        """Whether the master is still what was copied (Invariant 6)."""
        return self._of.has_version and self.unchanged(master)

    def as_copied(self, master: torch.Tensor) -> bool:
        """Whether neither side has been written to; False may be wrong."""
        untouched = self._sum is None and self.data._version == self.version
        return untouched and self._of.has_version and self._of.is_of(master)

    def unchanged(self, master: torch.Tensor) -> bool:
        """Whether no change of the master since the copy is known. An inference tensor has no version.

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
        if self.stream is not None:
            self._order_after_copy()
        return alive

    def _order_after_copy(self) -> None:
        """Make the consumer's stream wait for the copy, and the memory for that stream (Invariants 1, 2)."""
        current = _current_stream(self.destination.device)
        if current != self.stream and current not in self.users:
            current.wait_stream(self.stream)
            self.data.record_stream(current)
            self.users.append(current)

    def _wait_for_users(self) -> None:
        """Make this thread's stream wait for whoever may have written the bytes."""
        if self.stream is not None:
            current = _current_stream(self.destination.device)
            for stream in (self.stream, *self.users):
                if stream != current:
                    current.wait_stream(stream)

    def written(self) -> bool:
        """Whether a handed-out tensor, or its `.data`, was written since the two sides were equal."""
        return self.data._version != self.version or (self._sum is not None and self._sum != self._bits_sum())

    def lost(self, master: torch.Tensor) -> bool:
        """Whether the copy was written in place, and its master, too, so that the two cannot be put together.

        True once for each write: it is forgotten. See Note [Two writes, one weight].
        """
        if not self.written() or self.before is not None or self.unchanged(master):
            return False
        self._note_versions()
        return True

    def write_back(self, master: torch.Tensor) -> bool:
        """Bring what was written on the device to the master; True if it was any.

        Only elements that differ are written: the others keep the master's precision. If the master is not
        current, nothing is; where other masters have some of its bytes, those elements are that it still has
        as they were copied.
        """
        if not self.compare and not self.written():
            return False
        current = self.unchanged(master)
        if not current and self.before is None:
            return False
        self._wait_for_users()
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            now = master.detach()
            copied = now if self.before is None else self.before
            changed = changed_elements(self.data, self.destination.convert(copied)).to(master.device)
            taken = self.data.to(device=now.device, dtype=now.dtype)
            if taken.dtype != self.data.dtype:
                # What the master rounds is in it by now: each further look would find it, and write it again.
                # Not `&=`: one of the two may be functorch's, and then cannot be written to the other.
                changed = changed & changed_elements(taken, now)
            if self.before is not None:
                changed = changed & ~changed_elements(now, copied)
            any_changed = bool(changed.any())
            if any_changed:
                written = torch.where(changed, taken, now)
                with torch.inference_mode(master.is_inference()):
                    master.detach().copy_(written)
                if self.before is not None:
                    differs = changed_elements(self.data, self.destination.convert(now))
                    self.before = with_changes(now, self.data, differs)
        if current:
            self._note_versions()
            self._of = MasterState(master, self._noted)
        return any_changed

    def aliased(self) -> bool:
        """Return whether something else holds the bytes: a view, a detached alias, an autograd graph."""
        return has_aliases(self.address)


@untraced
def _died(copy: weakref.ref[DeviceCopy], handed: object) -> None:
    made = copy()
    session = None if made is None else made.session()
    if made is not None and session is not None and not sys.is_finalizing():
        session.note_death(made, has_more_than_a_dying_alias(made.address))


#: All of them, by the address of their storage, which lives as long as they do.
copies: weakref.WeakValueDictionary[int, DeviceCopy] = weakref.WeakValueDictionary()


def _cloned(master: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
        return master.detach().clone()


def _current_stream(device: torch.device) -> Any:
    """The calling thread's stream on the device; None where there are no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
