"""Which masters have bytes in common (pure-Python provider; native: csrc/bindings/sharing.h)."""

from __future__ import annotations

import math
import threading
import weakref
from bisect import bisect_left, insort
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from dynswap_ext._python.mapped_files import span


class HasMaster(Protocol):
    """Anything with a master; a protocol, because the module of weights imports this one."""

    master: torch.Tensor


_Weight = TypeVar("_Weight", bound=HasMaster)


class Place(NamedTuple):
    """Where a master's elements are: runs of bytes without a gap, and the strides at which they repeat."""

    begin: int
    end: int
    run: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, master: torch.Tensor) -> Place:
        """Return where the elements of a master with memory are."""
        run = master.element_size()
        strides: list[int] = []
        for stride, size in sorted(zip(master.stride(), master.shape, strict=True)):
            if size == 1:
                continue
            if not strides and stride * master.element_size() == run:
                run *= size
            else:
                strides.append(stride * master.element_size())
        return cls(master.data_ptr(), master.data_ptr() + span(master), run, tuple(strides))


def may_overlap(a: Place, b: Place) -> bool:
    """Whether a byte may be of both; True may be wrong where strides have little in common."""
    if a.end <= b.begin or b.end <= a.begin:
        return False
    step = math.gcd(*a.strides, *b.strides)
    if step == 0:
        return True
    between = (b.begin - a.begin) % step
    return between < a.run or step - between < b.run


def part_of_storage(master: torch.Tensor) -> bool:
    """Whether there are bytes in the master's storage that are not its elements."""
    return master.untyped_storage().nbytes() != master.nbytes


class Overlaps(Generic[_Weight]):
    """The weights whose masters have memory on the CPU, by their addresses. Thread-safe."""

    def __init__(self) -> None:
        self._begins: list[tuple[int, int]] = []
        self._known: dict[int, tuple[Place, weakref.ref[_Weight]]] = {}
        self._longest = 0
        #: What `of` found, for as long as no weight comes or moves.
        self._found: dict[int, list[weakref.ref[_Weight]]] = {}
        #: Another object whenever one does: what overlapped with nothing then may overlap with it.
        self.state = object()
        self.renew_lock()

    def renew_lock(self) -> None:
        # Reentrant: a weight may die, and be forgotten, while this thread has it.
        self._changing = threading.RLock()

    def of(self, weight: _Weight) -> list[_Weight]:
        """Return the weights whose masters have some of this one's bytes, and take this one up."""
        master, key = weight.master, id(weight)
        if master.device.type != "cpu" or master.layout is not torch.strided or not master.numel():
            return []
        known = self._known.get(key)
        if known is None or known[1]() is not weight or known[0].begin != master.data_ptr():
            self._take_up(weight, Place.of(master))
        found = self._found.get(key)
        if found is None:
            found = self._look(key)
        return [alive for reference in found if (alive := reference()) is not None]

    def _take_up(self, weight: _Weight, place: Place) -> None:
        key = id(weight)
        with self._changing:
            self._forget(key)
            self._known[key] = place, weakref.ref(weight, lambda _: self._forget(key))
            insort(self._begins, (place.begin, key))
            self._longest = max(self._longest, place.end - place.begin)
            self._found.clear()
            self.state = object()

    def _forget(self, key: int) -> None:
        with self._changing:
            known = self._known.pop(key, None)
            self._found.pop(key, None)
            entry = (known[0].begin, key) if known is not None else (0, 0)
            at = bisect_left(self._begins, entry)
            if self._begins[at : at + 1] == [entry]:  # else an interrupt came between
                del self._begins[at]

    def _look(self, key: int) -> list[weakref.ref[_Weight]]:
        with self._changing:
            known = self._known.get(key)
            if known is None:
                return []
            place = known[0]
            first = bisect_left(self._begins, (place.begin - self._longest, 0))
            last = bisect_left(self._begins, (place.end, 0))
            keys = [other for _, other in self._begins[first:last] if other != key and other in self._known]
            near = [self._known[other] for other in keys]
            found = self._found[key] = [weight for other, weight in near if may_overlap(place, other)]
            return found
