"""One weight's bytes on the device, and the tensors handed out from them (pure-Python provider).

A handed-out tensor is an alias of `DeviceCopy.data` that stands in the autograd graph of its master. Both
share one version counter, so what is written in place on the tensor shows in `DeviceCopy.data`, also after
the tensor itself is gone.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dynswap_ext._python.autograd import alias, fetch, is_fetched
from dynswap_ext._python.destination import Destination, lies_as_copy
from dynswap_ext._python.mapped_files import check_mapped
from dynswap_ext._python.memory_watch import MemoryWatch
from dynswap_ext._python.overlaps import Overlaps, Place, may_overlap, part_of_storage
from dynswap_ext._python.statistics import Counts
from dynswap_ext._python.storage_owners import (
    has_aliases,
    has_more_than_a_dying_alias,
    storage_address,
)
from dynswap_ext._swap.changed_elements import bits, changed_elements, with_changes
from dynswap_ext._util.modes import unseen_by_modes
from dynswap_ext._util.untraced import untraced

#: The weights of all sessions.
overlaps: Final[Overlaps[Weight]] = Overlaps()
#: The sequence number that torch gives AccumulateGrad.
_AT_ONCE: Final = 2**64 - 1
#: Where masters overlap, those of which the copy is larger are not put together by element, which takes a
#: copy of each (native: kMerged in csrc/bindings/handed_out.cpp).
_MERGED: Final = 1 << 20


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
        "planned",
        "resident",
        "watched",
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
        #: What counts the writes to the master's bytes, since somebody asked `watch` for it.
        self.watched: MemoryWatch | None = None
        #: What handed-out tensors are results of, for as long as some graph has it; and its watch.
        self._fetched: tuple[weakref.ref[torch.Tensor], MemoryWatch | None] | None = None
        #: Whether the running module has asked for it before, and what its reads are then results of.
        self.asked_again = False
        self._in_call: _InCall | None = None
        self.overlapping()  # which takes it up

    def to_plan(self) -> int:
        """Return the device bytes for which a plan has to give it a place; 0: it has none."""
        return self.destination.bytes_for(self.master) if lies_as_copy(self.master) else 0

    def overlapping(self) -> list[Weight]:
        """The weights whose masters have some of this one's bytes."""
        return overlaps.of(self)

    def watch(self) -> MemoryWatch | None:
        """Count the writes to the master's bytes from now on; None if they are not in RAM."""
        master = self.master
        if master.device.type != "cpu" or master.numel() == 0:
            return None
        if self.watched is None or not self.watched.of(master):
            self.watched = MemoryWatch(master)
        return self.watched

    def let_go(self) -> None:
        """Note that the running module's call is over: the next one reads anew."""
        self.kept = self.asked_again = False
        self._in_call = None

    def follow(self, earlier: Weight) -> None:
        """Take the place of another session's weight: graphs lead to what was handed out of that."""
        self._fetched = earlier._fetched

    def connected(self, copy: DeviceCopy) -> torch.Tensor:
        """Return an alias of the weight's bytes on the device, in the graph of the master."""
        in_call, data = self._in_call, copy.data
        if in_call is not None and in_call.copy() is copy and in_call.accumulates.variable is self.master:
            return alias(in_call.fetched, data)
        in_call = self._in_call = None  # before it is made anew: it has what has the master's old shape
        watch = copy.watch
        known, of = self._fetched or (None, None)
        fetched = known() if known is not None and of is watch else None
        if fetched is None or not is_fetched(fetched, self.master, data):
            fetched = fetch(self.master, data, watch)
            node: Any = fetched.grad_fn
            # It runs as soon as it can, like AccumulateGrad. An earlier graph may have it too: then it would
            # run last, and gradients would pile up on the device until the end of the backward pass.
            node._set_sequence_nr(_AT_ONCE)
            self._fetched = weakref.ref(fetched), watch
            # Not at the first read, with which most modules have all that they want of it: what is kept keeps
            # the master's AccumulateGrad, whose shape stays what it is now.
            if self.asked_again and self.master.is_leaf:
                self._in_call = _InCall(fetched, node.next_functions[0][0], weakref.ref(copy))
        return alias(fetched, data)


class DeviceCopy:
    """A weight's bytes on the device."""

    def __init__(self, weight: Weight, session: Any, freed: deque[int]) -> None:
        #: Weakly, as the weight has its current copy; and no master, as what hangs on one may lead to its
        #: model: a model is freed with its last reference, whoever still has its copies.
        self.owner = weakref.ref(weight)
        self.session = weakref.ref(session)
        self.destination = weight.destination
        master = weight.master
        self.watch = weight.watch()
        writes = self._writes()
        check_mapped(master)
        with torch.inference_mode(False), torch.no_grad(), unseen_by_modes():
            self.data: torch.Tensor = self.destination.convert(master.detach())
            #: What was copied, where other masters have some of its bytes: what differs was written here.
            merged = self.data.nbytes <= _MERGED and weight.overlapping()
            self.before = master.detach().clone() if merged else None
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
        #: The state of `overlaps` in which the master was known to have no bytes in common with others.
        self.alone_in: object = None
        #: Whether writes may have happened that no version counter shows.
        self.compare = False
        #: Tells of most such writes, and is known if somebody has taken `.data` outside a forward.
        self._sum: int | None = None
        self._note(master, writes)
        #: Of the bytes' storage.
        self.address = storage_address(self.data)
        copies[self.address] = self

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # never made: out of memory
            self.freed.append(self.nbytes)

    @property
    def weight(self) -> Weight | None:
        """The weight whose current copy this is; None if the weight has another copy by now."""
        weight = self.owner()
        return weight if weight is not None and weight.copy is self else None

    def _writes(self) -> int:
        return 0 if self.watch is None else self.watch.writes()

    def _note(self, master: torch.Tensor, writes: int) -> None:
        """Remember the present state of both sides as equal, but for what was written to the master since."""
        self._note_versions()
        self._guard = StorageWeakRef(master.untyped_storage())  # type: ignore[no-untyped-call]  # its address is not given to another
        self._seen, self._seen_writes = _identity(master), writes

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
        return self._seen[0] is not None and self.unchanged(master)

    def as_copied(self, master: torch.Tensor) -> bool:
        """Whether neither side has been written to; False may be wrong."""
        seen = self._seen
        try:
            if seen[0] is None or seen != _identity(master):
                return False
        except RuntimeError:  # it has been swapped with a tensor that has no memory
            return False
        if self.watch is not None and self._seen_writes != self.watch.writes():
            return False
        return self._sum is None and self.data._version == self.version

    def unchanged(self, master: torch.Tensor) -> bool:
        """Whether no change of the master since the copy is known. An inference tensor has no version."""
        seen, now = self._seen, _identity(master)
        if seen == now:
            return self._seen_writes == self._writes()
        return seen[1:] == now[1:] and self._seen_writes == self._writes() and self._of_a_neighbour(master)

    def _of_a_neighbour(self, master: torch.Tensor) -> bool:
        """Whether a write that the version tells of was to others of the storage, who share the counter."""
        watch = self.watch
        return watch is not None and not watch.sampled and part_of_storage(master) and not master.is_pinned()

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
                with torch.inference_mode(master.is_inference()), self._neighbours_as_they_were(master):
                    master.detach().copy_(written)
                if self.before is not None:
                    differs = changed_elements(self.data, self.destination.convert(now))
                    self.before = with_changes(now, self.data, differs)
        if current:
            self._note(master, self._writes())
        return any_changed

    @contextlib.contextmanager
    def _neighbours_as_they_were(self, master: torch.Tensor) -> Iterator[None]:
        """Keep what is written here from counting as a write to others of the storage, who share the counter.

        What has bytes in common with the master has changed.
        """
        place, storage = Place.of(master), self._seen[1]
        unchanged = []
        for other in list(copies.values()) if part_of_storage(master) else []:
            weight = other.owner()
            if other is self or weight is None or weight.master is master or other._seen[1] != storage:
                continue
            if other._seen[0] == _identity(weight.master)[0] and not may_overlap(
                place, Place.of(weight.master)
            ):
                unchanged.append((other, weight))
        yield
        for other, weight in unchanged:
            other._seen = (_identity(weight.master)[0], *other._seen[1:])

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


def _identity(master: torch.Tensor) -> tuple[Any, ...]:
    """What changes when the master's content does; version None means that it cannot be told."""
    try:
        version = master._version
    except RuntimeError:  # of an inference tensor
        version = None
    where = master.untyped_storage()._cdata, master.data_ptr()
    return version, *where, master.dtype, master.shape, master.stride(), master.is_conj(), master.is_neg()


def _current_stream(device: torch.device) -> Any:
    """The calling thread's stream on the device; None where there are no streams."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)
