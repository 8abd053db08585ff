"""The copies that a session of the pure-Python provider has on the device, and how they go."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynswap_ext._python.device_copy import DeviceCopy, Weight
from dynswap_ext._python.lock import Exclusive
from dynswap_ext._python.memory_watch import MemoryWatch, is_sampled
from dynswap_ext._swap.protocol import Hooks
from dynswap_ext._swap.state import STATE_KEY, name_in
from dynswap_ext._util.untraced import untraced

__all__ = ["HeldCopies"]


class HeldCopies:
    """What is on the device for one install, and who still has it. Thread-safe."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self._warned: set[str] = set()
        self._closed = False
        self._root: Callable[[], nn.Module | None] = lambda: None
        # LOCK: guards everything below, and the counters, except the deques.
        self._exclusive = Exclusive(self._settle_deaths)
        # By the master's id. The modules' states own the weights, which own the residents' copies.
        self._weights: weakref.WeakValueDictionary[int, Weight] = weakref.WeakValueDictionary()
        self._held: dict[int, DeviceCopy] = {}
        self._orphans: dict[int, DeviceCopy] = {}
        self._bytes = 0
        self._freed: deque[int] = deque()
        self._deaths: deque[tuple[int, bool]] = deque()
        _sessions.add(self)

    def flush(self) -> None:
        """What was written on handed-out tensors is in the masters when this returns."""
        with self._exclusive:
            self._settle_deaths()
            self._find_lost()
            self._sweep()
            for copy in list(self._held.values()):
                weight = copy.weight
                if weight is not None:
                    copy.write_back(weight.master)

    def write_back_buffers(self) -> None:
        """What a call wrote on buffers, with or without a trace, is in the masters when it is over."""
        with self._exclusive:
            for copy in list(self._held.values()):
                weight = copy.weight if copy.compare else None
                if weight is None or isinstance(weight.master, nn.Parameter):
                    continue
                copy.write_back(weight.master)

    def flush_module(self, module: nn.Module) -> None:
        """Flush; what is held is little here, and not sorted by module."""
        self.flush()

    def release(self, module: nn.Module) -> None:
        """Flush, and keep no resident's tensor, which is part of its master's graph."""
        self.flush()
        with self._exclusive:
            for weight in module.__dict__[STATE_KEY].weights.values():
                if weight.copy is not None and id(weight.copy) not in self._held:
                    weight.copy = None

    def expect_writes(self, masters: list[torch.Tensor]) -> None:
        """Announce that an optimizer is about to write to these masters; those of others are ignored."""
        for watch in self._watches(masters):
            watch.expect_writes()

    def note_writes(self, masters: list[torch.Tensor]) -> None:
        """Count a write to each of these masters that is sampled: an optimizer has stepped."""
        for watch in self._watches(masters):
            watch.note_write()

    def _watches(self, masters: list[torch.Tensor]) -> list[MemoryWatch]:
        with self._exclusive:
            known = ((master, self._weights.get(id(master))) for master in masters)
            weights = [weight for master, weight in known if weight is not None and weight.master is master]
            return [watch for weight in weights if (watch := weight.watched) is not None]

    @property
    def sampled_bytes(self) -> int:
        """Bytes of masters that are sampled: a small write to them that bumps no version may go unseen."""
        with self._exclusive:
            masters = [weight.master for weight in list(self._weights.values())]
        return sum(master.nbytes for master in masters if is_sampled(master))

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

    def _finish(self, copy: DeviceCopy) -> None:
        """Nobody can write the copy's bytes any more."""
        self._held.pop(id(copy), None)
        self._orphans.pop(id(copy), None)
        weight = copy.weight
        if weight is not None and copy.unchanged(weight.master):
            # The next access gets what the master has of it, which may be rounded.
            weight.kept = not copy.write_back(weight.master) and weight.kept
        elif copy.before is not None and (owner := copy.owner()) is not None:
            copy.write_back(owner.master)  # what it shares with others may have changed, and not the rest
        elif copy.written():
            self._warn_lost(copy.owner())
        copy.compare = False
        if weight is not None:
            self._drop(weight)

    def _drop(self, weight: Weight) -> None:
        """Let the copy go if nothing wants it to stay."""
        if weight.copy is not None and not (weight.resident or weight.kept or id(weight.copy) in self._held):
            weight.copy = None

    def release_kept(self, weight: Weight) -> None:
        """The call that the weight's copy was kept for is over."""
        with self._exclusive:
            weight.kept = False
            self._drop(weight)

    def _find_lost(self) -> None:
        """Settle deaths whose notice was lost: an interrupt can come in a weak reference's callback."""
        for key, copy in list(self._held.items()):
            if copy.handed is not None and copy.handed() is None:
                self._settle(key, aliased=True)

    def _held_bytes(self) -> int:
        """Device bytes of all copies that exist."""
        while self._freed:
            self._bytes -= self._freed.popleft()
        return self._bytes

    def close(self) -> None:
        """Let go of device memory, except what handed-out tensors hold; those can still be written."""
        with self._exclusive:
            self._closed = True
            for weight in list(self._weights.values()):
                weight.resident = weight.kept = False
                self._drop(weight)

    def _name(self, weight: Weight | None) -> str:
        root = self._root()
        return "a weight" if root is None or weight is None else name_in(root, weight.master)

    def _warn_lost(self, weight: Weight | None) -> None:
        self._warn_once(
            "lost",
            f"a tensor handed out from {self._name(weight)} was written in place although its master had "
            "changed since; the master stands, and what was written is dropped",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.hooks.warn(message)

    def _settle_deaths(self) -> None:
        while self._deaths:
            self._settle(*self._deaths.popleft())

    @staticmethod
    @untraced
    def _died(handed: Any) -> None:
        session = handed.session()
        if session is not None and not sys.is_finalizing():
            session._on_death(handed.key)

    def _on_death(self, key: int) -> None:
        copy = self._held.get(key)
        if copy is None:
            return
        self._deaths.append((key, copy.aliased_at_death()))
        self._exclusive.settle_if_free()


_sessions: weakref.WeakSet[HeldCopies] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: no thread is left that could release a lock held at the fork."""
    for session in list(_sessions):
        session._exclusive.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
