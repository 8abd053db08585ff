"""`budget="auto"` and `Handle.retune`: passes are measured, and what stays on the device follows from them.

Note [When a plan is tuned]: the first pass of a model is like no other: everything is brought for the first
time, kernels are chosen, caches are filled. So one pass goes by, the next ones are recorded, and the plan
is made at the beginning of the one after, when nothing is in use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import all_bytes, format_bytes, free_bytes
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import BudgetError, OutOfMemoryError

__all__ = ["Tuner", "Tuning", "smaller_budget"]

#: Passes that go by before any is measured, and passes that are.
_WARM_UP = 1
_MEASURED = 2

#: Activations differ from pass to pass.
_ACTIVATION_MARGIN = 1.1
#: Of all memory of the device: it stays free for what nobody measures (fragmentation, other programs).
_KEPT_FREE = {"cpu": 0.1}
_KEPT_FREE_ON_ACCELERATORS = 0.03
#: What is left of a budget that was too large.
_SHRINK = 0.75


@dataclass(frozen=True)
class Tuning:
    """What was measured, and what came of it. Times are seconds of one pass."""

    #: Passes that were measured; 0: none could be.
    passes: int
    #: Bytes for streamed and resident weights together, from then on; None: just what `prefetch` needs.
    budget: int | None
    #: Bytes by which the measured passes exceeded what was in use between them.
    activation_bytes: int
    #: Everything but waits for weights.
    compute_seconds: float
    wait_seconds: float
    #: Of the copies, while any was under way.
    bytes_per_second: float
    #: By the engine on its virtual clock, with the plan of before and the new one; None where nothing was to
    #: be placed (no budget, no copies, or the pure-Python provider).
    seconds_before: float | None
    seconds_after: float | None


class Tuner:
    """Told of a model's calls, it plans anew when enough of them were measured. Thread-safe."""

    def __init__(
        self, session: Any, root: Callable[[], nn.Module | None], budget: int | None, *, automatic: bool
    ) -> None:
        # The session has the tuner, not the other way round; neither shall keep the model alive.
        self._session: Callable[[], Any] = weakref.ref(session)
        self._root = root
        self._lock = threading.Lock()
        # LOCK: guards all below.
        self._budget = budget
        self._wanted = budget
        self._automatic = automatic
        #: Until the plan is made; None: nothing is to be measured.
        self._calls_left: int | None = _WARM_UP + _MEASURED if automatic else None
        self._peak: PeakMemory | None = None
        self.latest: Tuning | None = None

    @property
    def budget(self) -> int | None:
        """Bytes that are planned with now."""
        return self._budget

    def measure(self, budget: int | None, *, automatic: bool | None = None) -> None:
        """Measure the next passes, and plan then: for this budget or, automatic, for what they leave."""
        with self._lock:
            self._stop_recording()
            self._wanted = budget
            self._automatic = self._automatic if automatic is None else automatic
            self._calls_left = _WARM_UP + _MEASURED

    def __call__(self) -> None:
        """A call of the model begins."""
        # Other threads' calls go on meanwhile with the plan there is.
        if self._calls_left is None or not self._lock.acquire(blocking=False):
            return
        try:
            session = self._session()
            if session is not None and self._calls_left is not None:
                self._step(session)
        finally:
            self._lock.release()

    def call_failed(self, error: BaseException) -> None:
        """A call of the model ended with an error. If memory has run out, weights take less from now on.

        The call itself is not made again: what it has done (a key-value cache, a random number) is done.
        """
        if not isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or not self._automatic:
            return
        session = self._session()
        if session is None or self._budget is None:
            return
        with self._lock:
            self._stop_recording()
            self._calls_left = None
            before = self._budget
            self._plan(session, smaller_budget(min(before, session.stats()["weight_bytes"])), 0)
            note = (
                f"{_amount(self._budget)} of weights may stay on the device from now on, not "
                f"{format_bytes(before)}: the next call has more room"
            )
        if hasattr(error, "add_note"):
            error.add_note(f"dynswap_ext: {note}")
        warn(f"memory ran out in a call of the model: {note}")

    def _step(self, session: Any) -> None:
        assert self._calls_left is not None
        if self._calls_left == _MEASURED:
            self._peak = PeakMemory(session.device)
            session.record(True)
            session.note_pass()
        if self._calls_left > 0:
            self._calls_left -= 1
            return
        self._calls_left = None
        activations = self._peak.more() if self._peak is not None else 0
        self._stop_recording()
        wanted = self._room(session, activations) if self._automatic else self._wanted
        self._plan(session, wanted, activations)

    def _stop_recording(self) -> None:
        session = self._session()
        if self._peak is not None and session is not None:
            session.record(False)
        self._peak = None

    def _room(self, session: Any, activations: int) -> int | None:
        """Bytes that the measured passes leave for weights."""
        device = session.device
        stats = session.stats()
        held = stats["resident_bytes"] + stats["arena_bytes"]
        kept_free = _KEPT_FREE.get(device.type, _KEPT_FREE_ON_ACCELERATORS) * all_bytes(device)
        room = free_bytes(device) + held - int(_ACTIVATION_MARGIN * activations) - int(kept_free)
        return room if room > 0 else None

    def _plan(self, session: Any, budget: int | None, activations: int) -> None:
        root = self._root()
        if root is None:
            return
        earlier = self._budget
        while True:
            try:
                seen = session.retune(root, budget)
                break
            except (BudgetError, OutOfMemoryError) as error:
                if budget is None:
                    raise
                if isinstance(error, BudgetError) and not self._automatic:
                    warn(f"retune({budget}) is not done ({error}); the budget is still {_amount(earlier)}")
                    return
                smaller = smaller_budget(budget) if isinstance(error, OutOfMemoryError) else None
                warn(f"a budget of {format_bytes(budget)} does not work ({error}); trying {_amount(smaller)}")
                budget = smaller
        self._budget = budget
        self.latest = Tuning(budget=budget, activation_bytes=activations, **seen)
        logger.info(
            "tuned: budget %s (was %s), activations %s; %d passes of %.4g s compute and %.4g s waits",
            *(_amount(size) for size in (budget, earlier, activations)),
            self.latest.passes,
            self.latest.compute_seconds,
            self.latest.wait_seconds,
        )


def smaller_budget(budget: int) -> int | None:
    """The next one to try, in bytes; None: only what `prefetch` needs."""
    smaller = int(_SHRINK * budget)
    return smaller if smaller > 1 << 20 else None


def _amount(size: int | None) -> str:
    return "only what `prefetch` needs" if size is None else format_bytes(size)
