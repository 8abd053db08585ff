"""`budget="auto"` and `Handle.retune`: passes are measured, and what stays on the device follows from them.

Note [When a plan is tuned]: the first pass of a model is like no other: everything is brought for the first
time, kernels are chosen, caches are filled. So one pass goes by, the next ones are recorded, and the plan
is made at the beginning of the one after, when nothing is in use.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.protocol import Session
from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import all_bytes, format_bytes, free_bytes
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.warn import warn
from dynswap_ext.errors import BudgetError, OutOfMemoryError

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
    """Hears of a model's calls, and makes a new plan when enough of them were measured. Thread-safe."""

    def __init__(self, session: Session, budget: int | None, *, automatic: bool) -> None:
        self._session = session
        self._lock = threading.Lock()
        # LOCK: guards all below.
        #: Bytes that are planned with now, and that the next plan is for unless it is automatic.
        self.budget = self._wanted = budget
        self._automatic = automatic
        #: Until the plan is made; None: nothing is to be measured.
        self._calls_left: int | None = _WARM_UP + _MEASURED if automatic else None
        self._peak: PeakMemory | None = None
        self.latest: Tuning | None = None

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
        if self._calls_left is not None and self._lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._lock.release()

    def call_failed(self, error: BaseException) -> None:
        """A call of the model ended with an error. If memory has run out, weights take less from now on.

        The call itself is not made again: what it has done (a key-value cache, a random number) is done.
        """
        if not isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or not self._automatic:
            return
        if self.budget is None:
            return
        with self._lock:
            self._stop_recording()
            self._calls_left = None
            before = self.budget
            self._plan(smaller_budget(min(before, self._session.stats()["weight_bytes"])), 0)
            note = (
                f"{_amount(self.budget)} of weights may stay on the device from now on, not "
                f"{format_bytes(before)}: the next call has more room"
            )
        if hasattr(error, "add_note"):
            error.add_note(f"dynswap_ext: {note}")
        warn(f"memory ran out in a call of the model: {note}")

    def _step(self) -> None:
        if self._calls_left is None:
            return
        if self._calls_left == _MEASURED:
            self._peak = PeakMemory(self._session.device)
            self._session.record(True)
            self._session.note_pass()
        if self._calls_left > 0:
            self._calls_left -= 1
            return
        self._calls_left = None
        activations = self._peak.more() if self._peak is not None else 0
        self._stop_recording()
        self._plan(self._room(activations) if self._automatic else self._wanted, activations)

    def _stop_recording(self) -> None:
        if self._peak is not None:
            self._session.record(False)
        self._peak = None

    def _room(self, activations: int) -> int | None:
        """Bytes that the measured passes leave for weights."""
        device, stats = self._session.device, self._session.stats()
        held = stats["resident_bytes"] + stats["arena_bytes"]
        kept_free = _KEPT_FREE.get(device.type, _KEPT_FREE_ON_ACCELERATORS) * all_bytes(device)
        room = free_bytes(device) + held - int(_ACTIVATION_MARGIN * activations) - int(kept_free)
        return room if room > 0 else None

    def _plan(self, budget: int | None, activations: int) -> None:
        root = model_of(self._session)
        if root is None:
            return
        earlier = self.budget
        while True:
            try:
                seen = self._session.retune(root, budget)
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
        self.budget = budget
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
