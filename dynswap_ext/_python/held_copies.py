"""The copies that a session of the pure-Python provider has on the device, and how they go.

Note [Deaths are settled later]
-------------------------------
A handed-out tensor can die anywhere: in another thread, in the autograd engine, in a garbage collection
that an allocation of the session's own code set off. So the weak reference's callback tries to
take the lock, without waiting, and settles the death itself if it gets the lock. Else it appends to a deque,
which needs no lock, and the thread that has the lock settles what is there before it lets go.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.master_state import is_sampled
from dynswap_ext._python.statistics import Statistics
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.protocol import Hooks
from dynswap_ext._swap.state import STATE_KEY, name_in, named_modules_of
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.own_masters import own_masters


class Exclusive:
    """A session's lock, which settles deaths when it is let go. See Note [Deaths are settled later].

    Reentrant, as a garbage collection may run user code that accesses a module while it is held.
    """

    __slots__ = ("_deaths", "_depth", "_lock", "_session")

    def __init__(self, session: HeldCopies) -> None:
        self._session = weakref.ref(session)
        self._deaths = session.deaths
        self.renew()

    def renew(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        try:
            if self._deaths and self._depth == 1:
                session = self._session()
                if session is not None:
                    session.settle_deaths()
        finally:
            self._depth -= 1
            self._lock.release()

    def enter_if_free(self) -> bool:
        """Enter, unless some thread has; whoever did ends it with `__exit__`."""
        if self._depth or not self._lock.acquire(False):
            return False
        self._depth += 1
        return True


class HeldCopies(Statistics):
    """What is on the device for one install, and who still has it. Thread-safe."""

    _exclusive: Exclusive
    device: torch.device

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self._warned: set[str] = set()
        self._closed = False
        self._root: Callable[[], nn.Module | None] = lambda: None
        # LOCK: guards everything below, except the deques.
        self.deaths: deque[tuple[DeviceCopy, bool]] = deque()
        self._exclusive = Exclusive(self)
        # By the master's id. The modules' states own the weights, which own the residents' copies.
        self._weights: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        #: Those whose bytes somebody can write. `handed` is None where only aliases are left (`w.data`).
        self._held: dict[int, DeviceCopy] = {}
        self._bytes = 0
        self._freed: deque[int] = deque()
        _sessions.add(self)

    def stats(self) -> dict[str, int]:
        with self._exclusive:
            self._collect()
            held = {"live_leases": len(self._held)}
            return Counter({**self._counters, **self._plan, **held, **self._bytes_by_source()})

    def reset_stats(self) -> None:
        with self._exclusive:
            self._counters = Counter(peak_bytes=self._held_bytes())
            for counts in self._counts:
                counts.reset()

    def groups(self) -> list[dict[str, Any]]:
        with self._exclusive:
            self._describe()
            return [counts.figures() for counts in self._in_order()]

    def flush(self) -> None:
        with self._exclusive:
            self._collect()
            for copy in list(self._held.values()):
                self.take_to_master(copy)

    def call_ends(self) -> None:
        """What a call wrote, on buffers without a trace, too, is in the masters when it is over."""
        with self._exclusive:
            for copy in list(self._held.values()):
                weight = copy.weight
                buffer = weight is not None and not isinstance(weight.master, nn.Parameter)
                if copy.written() or (copy.compare and buffer):
                    self.take_to_master(copy)

    def take_to_master(self, copy: DeviceCopy) -> bool:
        """Take what was written on a copy to its master, or say that it is lost; True if it was any."""
        with self._exclusive:
            weight = copy.owner()
            if weight is None:
                return False
            if copy.lost(weight.master):
                self._warn_once(f"lost {id(weight)}", self._name(weight), self.hooks.warn_lost)
                return False
            # Of one that is not its weight's any more, what the master shares with others may have changed.
            return (weight.copy is copy or copy.before is not None) and copy.write_back(weight.master)

    def flush_module(self, module: nn.Module) -> None:
        self.flush()  # what is held is little here, and not sorted by module

    def release(self, module: nn.Module) -> None:
        """Flush, and keep no resident's tensor, which is part of its master's graph."""
        self.flush()
        with self._exclusive:
            for weight in module.__dict__[STATE_KEY].weights.values():
                if weight.copy is not None and id(weight.copy) not in self._held:
                    weight.copy = None

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        with self._exclusive:
            for weight in self._weights_of(masters):
                if weight.copy is not None and id(weight.copy) in self._held:
                    self.take_to_master(weight.copy)

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        with self._exclusive:
            for weight in self._weights_of(masters):
                weight.noted.count += 1

    def _weights_of(self, masters: list[torch.Tensor]) -> list[Weight]:
        known = ((master, self._weights.get(id(master))) for master in masters)
        return [weight for master, weight in known if weight is not None and weight.master is master]

    @property
    def sampled_bytes(self) -> int:
        with self._exclusive:
            masters = [weight.master for weight in list(self._weights.values())]
        return sum(master.nbytes for master in masters if is_sampled(master))

    def close(self) -> None:
        """Let go of device memory, except what handed-out tensors hold; those can still be written."""
        with self._exclusive:
            self._closed = True
            for weight in list(self._weights.values()):
                weight.resident = False
                weight.let_go()
                self._drop(weight)

    def take_copy(self, weight: Weight, earlier: Weight, session: HeldCopies) -> None:
        """Go on with the copy that somebody has of a weight that was another session's, under both locks."""
        copy = earlier.copy
        weight.follow(earlier)
        if copy is None or session._held.pop(id(copy), None) is None:
            return
        earlier.copy, weight.copy = None, copy
        copy.owner, copy.session = weakref.ref(weight), weakref.ref(self)
        session._freed.append(copy.nbytes)
        copy.freed, self._bytes = self._freed, self._bytes + copy.nbytes
        self._held[id(copy)] = copy

    def release_kept(self, weight: Weight) -> None:
        with self._exclusive:
            weight.let_go()
            self._drop(weight)

    def note_death(self, copy: DeviceCopy, aliased: bool) -> None:
        """Note that the tensor handed out of a copy is dying; `aliased`: its bytes have other holders."""
        if not self._exclusive.enter_if_free():
            self.deaths.append((copy, aliased))
            return
        try:
            self._settle(copy, aliased)
        finally:
            self._exclusive.__exit__()

    def settle_deaths(self) -> None:
        while self.deaths:
            self._settle(*self.deaths.popleft())

    def _settle(self, copy: DeviceCopy, aliased: bool) -> None:
        """Note that the tensor handed out of a copy is dead; `aliased`: its bytes have other holders."""
        if id(copy) not in self._held:
            return
        if aliased:
            copy.compare = True  # the bytes can still be written, and with no version counter's trace
        if copy.handed is not None and copy.handed() is not None:
            return  # it was handed out again since
        copy.handed = None
        if aliased:
            return
        self._held.pop(id(copy), None)  # nobody can write its bytes any more
        weight = copy.owner()
        if copy.compare or copy.written():
            if self.take_to_master(copy) and weight is not None:
                weight.let_go()  # the next access gets what the master has of it, which may be rounded
            copy.compare = False
        if weight is not None and not weight.kept:
            self._drop(weight)

    def _collect(self) -> None:
        """Finish the copies whose bytes have no owner left.

        Of some deaths nobody was told: an interrupt came in a weak reference's callback.
        """
        self.settle_deaths()
        for copy in list(self._held.values()):
            if copy.handed is not None and copy.handed() is None:
                copy.handed, copy.compare = None, True
            if copy.handed is None and not copy.aliased():
                self._settle(copy, aliased=False)

    def _drop(self, weight: Weight) -> None:
        """Let the copy go if nothing wants it to stay."""
        if weight.copy is not None and not (weight.resident or weight.kept or id(weight.copy) in self._held):
            weight.copy = None

    def _held_bytes(self) -> int:
        """Device bytes of all copies that exist."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        return self._bytes

    def _describe(self) -> None:
        """Note what the weights are called by now, and where they are; that stays when they are gone."""
        root, files = self._tree(), FileMappings()
        names: dict[int, str] = {}
        for path, module in () if root is None else named_modules_of(root):
            for name, master, _ in own_masters(module):
                names.setdefault(id(master), f"{path}.{name}" if path else name)
        for weight in list(self._weights.values()):
            weight.counts.name = names.get(id(weight.master), weight.counts.name)
            weight.counts.source = _source_of(weight.master, files)

    def _bytes_by_source(self) -> dict[str, int]:
        """Return the bytes of masters by how they travel, named as in `Stats`."""
        found = dict.fromkeys(("pinned_bytes", "staged_bytes", "mapped_bytes"), 0)
        if self._closed:
            return found
        on_cpu = self.device.type == "cpu"
        travels = {"file": "mapped_bytes", "pinned RAM": "pinned_bytes", "RAM": "staged_bytes"}
        for weight in list(self._weights.values()):
            name = travels.get(weight.counts.source)
            if name is not None and (name == "mapped_bytes" or not on_cpu):
                found[name] += weight.master.nbytes
        return found

    def _name(self, weight: Weight | None) -> str:
        root = self._tree()
        return "a weight" if root is None or weight is None else name_in(root, weight.master)

    def _tree(self) -> nn.Module | None:
        return self._root() or model_of(self)

    def _warn_once(self, kind: str, message: str, warn: Callable[[str], None] | None = None) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            (warn or self.hooks.warn)(message)


def _source_of(master: torch.Tensor, files: FileMappings) -> str:
    """Where a master's bytes are, in the words of `GroupFigures.source`."""
    if master.device.type != "cpu":
        return "device"
    if files.overlapping(master.data_ptr(), max(master.nbytes, 1)):
        return "file"
    return "pinned RAM" if torch.accelerator.is_available() and master.is_pinned() else "RAM"


_sessions: weakref.WeakSet[HeldCopies] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: no thread is left that could release a lock held at the fork."""
    for session in list(_sessions):
        session._exclusive.renew()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_renew_locks)
