"""The copies that a session of the pure-Python provider has on the device, and how they are freed.

Note [Deaths are settled later]
-------------------------------
A handed-out tensor can die anywhere: in another thread, in the autograd engine, or in a garbage collection
that the session's own code set off by an allocation. So the callback of the weak reference to the tensor
appends to a deque, which needs no lock, and tries to take the sessions' lock without waiting. The thread that
has the lock handles what is in the deque before it releases the lock.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._python.coded_masters import memory_of
from dynswap_ext._python.device_copy import DeviceCopy, Weight, copies
from dynswap_ext._python.master_state import is_sampled
from dynswap_ext._python.statistics import Statistics
from dynswap_ext._python.storage_owners import has_aliases, has_more_than_a_dying_alias
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.protocol import Hooks
from dynswap_ext._swap.state import name_in, named_modules_of
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.lossless.tensor import LosslessTensor


class _Exclusive:
    """The lock that all sessions share. See Note [Deaths are settled later].

    It is reentrant, because a garbage collection in the thread that holds it may run code that reads weights.
    """

    def __init__(self) -> None:
        #: Copies whose handed-out tensor is dying, and whether their bytes have other holders.
        self.deaths: deque[tuple[DeviceCopy, bool]] = deque()
        self.renew()

    def renew(self) -> None:
        """Replace the lock. In a forked child, the thread that may have held it does not exist."""
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            while self.deaths and self._depth == 1:
                _settle(*self.deaths.popleft())
        finally:
            self._depth -= 1
            self._lock.release()

    def settle_if_free(self) -> None:
        if not self._depth and self._lock.acquire(False):
            self._depth += 1
            self.__exit__()


exclusive: Final = _Exclusive()
#: Copies whose bytes can be written, by a handed-out tensor or only by an alias (`w.data`; `handed` is None).
#: The value is None or, after the uninstall, the weight: nothing else keeps it alive for such writes then.
held: Final[dict[DeviceCopy, Weight | None]] = {}

if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=exclusive.renew)


def _settle(copy: DeviceCopy, aliased: bool) -> None:
    """Handle the death of a tensor that was handed out of a copy.

    If other tensors hold the copy's bytes (`aliased`), the copy stays held. Otherwise its changes are written
    to the master, and it is dropped unless something else keeps it.
    """
    if copy not in held:
        return
    if aliased:
        copy.compare = True  # the bytes can still be written, without bumping a version
    if copy.handed is not None and copy.handed() is not None:
        return  # the copy was handed out again since
    copy.handed = None
    if aliased:
        return
    del held[copy]  # its bytes cannot be written any more
    if copy.compare or copy.written():
        if take_to_master(copy):
            copy.let_go()  # the next access copies the master, which may have rounded what was written
        copy.compare = False
    if not copy.kept:
        drop(copy)


def drop(copy: DeviceCopy) -> None:
    """Drop a weight's copy, unless it is resident, kept for a running call, or held by tensors."""
    weight = copy.weight
    if weight is not None and not (weight.resident or copy.kept or copy in held):
        weight.copy = None


def take_to_master(copy: DeviceCopy) -> bool:
    """Write a copy's changes to its master, or warn that they are lost. Return whether there were any."""
    with exclusive:
        weight = copy.owner()
        return weight is not None and copy.write_back(weight)


class HeldCopies(Statistics):
    """The part of a session that knows its copies on the device and what holds them. Thread-safe."""

    _exclusive = exclusive
    device: torch.device

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks
        self._warned: set[str] = set()
        self._root: Callable[[], nn.Module | None] = lambda: None
        # By the id of the master. The states of modules own the weights, and a weight owns its copy.
        self._weights: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()

    def stats(self) -> dict[str, int]:
        with exclusive:
            self._collect()
            figures = {"live_leases": len(self._held())}
            return Counter({**self._counters, **self._plan, **figures, **self._bytes_by_source()})

    def reset_stats(self) -> None:
        with exclusive:
            self._counters = Counter(peak_bytes=self._bytes())
            for counts in self._in_order():
                counts.reset()

    def groups(self) -> list[dict[str, Any]]:
        with exclusive:
            self._describe()
            return [counts.figures() for counts in self._in_order()]

    def flush(self) -> None:
        with exclusive:
            self._collect()
            for copy in self._held():
                take_to_master(copy)

    def flush_module(self, module: nn.Module) -> None:
        self.flush()  # few copies are held at a time, and they are not sorted by module

    def call_ends(self) -> None:
        """Write to the masters what the ending call has written, to buffers even if it bumped no version."""
        with exclusive:
            for copy in self._held():
                weight = copy.weight
                buffer = weight is not None and not isinstance(weight.master, nn.Parameter)
                if copy.written() or (copy.compare and buffer):
                    take_to_master(copy)

    def release(self, module: nn.Module) -> None:
        """Write changes back to the masters. `torch.utils.swap_tensors` allows the references that stay."""
        self.flush()

    def _forget(self, weight: Weight) -> bool:
        """Drop a weight's copy, unless tensors hold it. Return whether it was dropped."""
        if weight.copy is None or weight.copy in held:
            return False
        weight.copy = None
        return True

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        with exclusive:
            for weight in self._weights_of(masters):
                if weight.copy is not None and weight.copy in held:
                    take_to_master(weight.copy)

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        with exclusive:
            for weight in self._weights_of(masters):
                weight.noted.count += 1

    def _weights_of(self, masters: list[torch.Tensor]) -> list[Weight]:
        known = ((master, self._weights.get(id(master))) for master in masters)
        return [weight for master, weight in known if weight is not None and weight.master is master]

    @property
    def sampled_bytes(self) -> int:
        with exclusive:
            masters = [weight.master for weight in list(self._weights.values())]
        return sum(master.nbytes for master in masters if is_sampled(master))

    def close(self) -> None:
        """Free device memory, except what handed-out tensors hold. Writes on them still reach the masters."""
        with exclusive:
            for weight in list(self._weights.values()):
                weight.resident = False
                self._forget(weight)

    def note_death(self, copy: DeviceCopy) -> None:
        """Note that a tensor that was handed out of a copy is being freed."""
        exclusive.deaths.append((copy, has_more_than_a_dying_alias(copy.address)))
        exclusive.settle_if_free()

    def _held(self) -> list[DeviceCopy]:
        return [copy for copy in list(held) if copy.session is self]

    def _collect(self) -> None:
        """Settle all copies that no tensor holds any more.

        Some of their deaths were not noted: those of aliases, and those where an interrupt came in the
        callback of the weak reference.
        """
        while exclusive.deaths:
            _settle(*exclusive.deaths.popleft())
        for copy in self._held():
            if copy.handed is not None and copy.handed() is None:
                copy.handed, copy.compare = None, True
            if copy.handed is None and not has_aliases(copy.address):
                _settle(copy, aliased=False)

    def _bytes(self) -> int:
        """Return the device bytes of all copies of this session that exist."""
        return sum([copy.nbytes for copy in list(copies.values()) if copy.session is self])

    def _describe(self) -> None:
        """Record the present name and place of each weight, for figures that outlive the model."""
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
        found: Counter[str] = Counter()
        travels = {"file": "mapped_bytes"}
        if self.device.type != "cpu":
            travels |= {"pinned RAM": "pinned_bytes", "RAM": "staged_bytes"}
        for weight in list(self._weights.values()):
            if weight.counts.source in travels:
                found[travels[weight.counts.source]] += weight.master.nbytes
        return found

    def _name(self, weight: Weight | None) -> str:
        root = self._tree()
        return "a weight" if root is None or weight is None else name_in(root, weight.master)

    def _tree(self) -> nn.Module | None:
        return self._root() or model_of(self)

    def tell_lost(self, weight: Weight) -> None:
        """Warn, once for each weight, that a write on a tensor that was handed out for it is lost."""
        self._warn_once(f"lost {id(weight)}", self._name(weight), self.hooks.warn_lost)

    def _warn_once(self, kind: str, message: str, warn: Callable[[str], None] | None = None) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            (warn or self.hooks.warn)(message)


def _source_of(master: torch.Tensor, files: FileMappings) -> str:
    """Return where a master's bytes are, in the words of `GroupFigures.source`."""
    if master.device.type != "cpu":
        return "device"
    memory = memory_of(master) if isinstance(master, LosslessTensor) else master
    if files.overlapping(memory.data_ptr(), max(memory.nbytes, 1)):
        return "file"
    return "pinned RAM" if torch.accelerator.is_available() and memory.is_pinned() else "RAM"
