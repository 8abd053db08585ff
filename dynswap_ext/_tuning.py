"""`budget="auto"` and `Handle.retune`: passes are measured, and what stays on the device follows from them.

Note [When a plan is tuned]: the first pass of a model is like no other: everything is brought for the first
time, kernels are chosen, caches are filled. So one pass goes by, the next ones are recorded, and the plan
is made at the beginning of the one after, when nothing is in use. A plan that `Handle.retune` has not asked
for waits for that: what other threads or kept tensors hold of the old plan would be on the device together
with the new one, and a CUDA graph would look for its weights where they were. Where threads take turns, or
tensors are kept, that may never come: after some passes the plan is made anyway, for the room that is left
beside what they can hold. What a CUDA graph has captured is waited for for ever.

Note [Passes of several threads]: threads that call the model at the same time share the bus and what is on
the device, so they are measured together. A pass counts when a thread has made one more than any had before;
until then, each of the others makes about as many. Threads that make one pass and end would never count so:
many passes that did not count are one, too.

Note [Steps within a round]: if several models share an install, a pass is a round, and the first round of a
pipeline may take minutes. If it calls one of them several times in a row, such as a denoiser, these calls are
measured as passes are, and residents move to that model at once. The budget stays as it is: only whole rounds
show how much memory the activations of all models take.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dynswap_ext._saved_plan import SavedPlan
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.protocol import Session
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import all_bytes, format_bytes, free_bytes, free_for_others
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.units import show_budget, show_rate, show_seconds
from dynswap_ext._util.warn import warn
from dynswap_ext.config import Budget, Options
from dynswap_ext.errors import BudgetError, OutOfMemoryError

#: Passes that go by before any is measured, and passes that are. Where residents had to give way, more go
#: by, up to `_MOST_WARM_UP`.
_WARM_UP = 1
_MEASURED = 2
_MOST_WARM_UP = 64
#: Passes of any thread that a plan waits for others to let go of the one before, at most.
_PATIENCE = 64
#: Passes that count as one, whichever threads made them: Note [Passes of several threads].
_MOST_THREADS = 64

#: Activations differ from pass to pass.
_ACTIVATION_MARGIN = 1.1
#: Of all memory of the device: it stays free for what nobody measures (fragmentation, other programs).
_KEPT_FREE = {"cpu": 0.1}
_KEPT_FREE_ON_ACCELERATORS = 0.03
#: Differences of the headroom that matter, as a part of it, and passes in which others have left memory until
#: weights take it.
_HEADROOM_STEPS = 8
_HEADROOM_PATIENCE = 8
#: What is left of a budget that was too large.
_SHRINK = 0.75


@dataclass(frozen=True)
class Tuning:
    """Measurements of passes, and the plan that follows from them. Times are seconds of one pass.

    ``print`` shows it.
    """

    #: Passes that were measured; 0 if none could be.
    passes: int
    #: Bytes for streamed and resident weights together in the new plan; None: only what `prefetch` needs.
    budget: int | None
    #: Bytes by which the measured passes exceeded what was in use between them. 0 after calls of a single
    #: model.
    activation_bytes: int
    #: Time of a pass without waits for weights. With several threads, the time in which not all of them
    #: waited, divided by the passes that they made together.
    compute_seconds: float
    #: Time of a pass that was spent in waits for weights.
    wait_seconds: float
    #: Rate of the copies, while any was under way; 0 if there were none.
    bytes_per_second: float
    #: Time of a pass with the plan before, as the engine predicts it on its virtual clock. None if there was
    #: nothing to place (no budget, no copies, or the pure-Python provider).
    seconds_before: float | None
    #: Time of a pass with the new plan, as the engine predicts it; None as for `seconds_before`.
    seconds_after: float | None
    #: Bytes of residents whose memory went to others inside a call since the tuning before this one.
    given_way_bytes: int = 0

    def __str__(self) -> str:
        rate = show_rate(self.bytes_per_second, "B/s")
        lines = [
            f"budget {show_budget(self.budget)}"
            + (f"; activations {format_bytes(self.activation_bytes)}" if self.activation_bytes else ""),
            f"{self.passes} passes measured: {show_seconds(self.compute_seconds)} of compute and "
            f"{show_seconds(self.wait_seconds)} of waits each; "
            + (f"copies at {rate}" if self.bytes_per_second else "no copies"),
        ]
        if self.seconds_before is not None and self.seconds_after is not None:
            lines.append(
                f"predicted: {show_seconds(self.seconds_after)} a pass with the new plan, "
                f"{show_seconds(self.seconds_before)} with the one before"
            )
        return "\n".join(lines)


def _tuning_of(saved: SavedPlan) -> Tuning | None:
    """Return what was measured for a plan that was saved; None if nothing was."""
    if saved.tuning is None:
        return None
    try:
        if wrong := [
            name for name, value in saved.tuning.items() if not isinstance(value, (int, float, type(None)))
        ]:
            raise TypeError(f"{wrong[0]} is no number")
        return Tuning(**saved.tuning)
    except TypeError as error:
        raise saved.refused(f"what was measured is damaged: {error}") from error


class HasBudget(Protocol):
    """An install, as far as its tuner needs it."""

    session: Session
    options: Options
    saved_plan: SavedPlan | None
    #: What plans are made with. The tuner changes it.
    budget: Budget


class Tuner:
    """Hears of a model's calls, and makes a new plan when enough of them were measured. Thread-safe."""

    def __init__(self, install: HasBudget) -> None:
        #: Weak, as the install owns the tuner: a cycle of the two would outlive the last user.
        self._install: HasBudget = weakref.proxy(install)
        self._session = install.session
        self._lock = threading.Lock()
        # LOCK: guards all below, and changes of the install's budget.
        #: Bytes of the next plan, unless its budget is automatic.
        self._next = install.budget.bytes
        #: Until the plan is made; None: nothing is to be measured.
        saved = install.saved_plan
        self._calls_left: int | None = _WARM_UP + _MEASURED if self._automatic and saved is None else None
        self._passes = _Passes()
        #: Passes since the plan was due.
        self._waited = 0
        self._peak: PeakMemory | None = None
        self.latest = None if saved is None else _tuning_of(saved)
        self._warm_up = _WARM_UP
        #: Whether calls in a row are recorded, and the models to which residents have moved.
        self._in_row = False
        self._moved_to: set[str] = set()
        #: Whether `Handle.retune` asked for the next plan.
        self._asked = False
        #: As the session counted at the latest plan.
        self._given_way = 0
        #: Bytes that are left to others, looked at in each pass; None: nobody asked for that.
        self._headroom = install.options.headroom
        #: As the latest measured passes took; None: not known, or memory has run out since.
        self._activations = None if self.latest is None else self.latest.activation_bytes
        #: The room in the latest passes, as long as it exceeds the plan; one too small for a plan.
        self._more_room: list[int] = []
        self._too_little = 0
        #: Whether torch's cache was emptied when others had too little, and they have not had enough since.
        self._cache_emptied = False

    @property
    def measuring(self) -> bool:
        """Whether a plan is to come of passes that are measured."""
        return self._calls_left is not None

    @property
    def _automatic(self) -> bool:
        return self._install.budget.automatic

    def measure(self, budget: Budget) -> None:
        """Measure the next passes, and plan then: for this budget or, automatic, for what they leave."""
        with self._lock:
            self._stop_recording()
            self._next = budget.bytes
            self._install.budget = replace(self._install.budget, automatic=budget.automatic)
            self._moved_to.clear()
            self._asked = True
            self._count_from(_WARM_UP + _MEASURED)

    def follow(self, earlier: Tuner) -> None:
        """Go on where the tuner of an earlier session of the install ended, which had the same budget.

        What it measured went with that session, so passes are measured again for a plan by time.
        """
        self.latest = earlier.latest
        if earlier.latest is not None or earlier._asked:
            present = self._install.budget
            self.measure(present if earlier._calls_left is None else replace(present, bytes=earlier._next))

    def begin_again(self) -> None:
        """Begin with the first pass again: the pass under way calls a model that had never been called."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._calls_left is not None or (self._automatic and self.latest is not None):
                self._stop_recording()
                self._count_from(_WARM_UP + _MEASURED)
                self._step()
        finally:
            self._lock.release()

    def __call__(self) -> None:
        """A pass begins: a call of the model, or a round of all models that share the install."""
        # Other threads' calls go on meanwhile with the plan there is.
        if self._headroom is not None and self._automatic:
            self._leave_headroom(self._headroom)
        gave_way = self._automatic and self._session.given_way_bytes != self._given_way
        if (gave_way or self._calls_left is not None) and self._lock.acquire(blocking=False):
            try:
                if gave_way:
                    if self._may_plan():
                        self._follow_those_who_gave_way()
                else:
                    self._step()
            finally:
                self._lock.release()

    def step(self, model: str, in_a_row: int) -> None:
        """Note a call of one of several models, after `in_a_row` calls of it: Note [Steps within a round]."""
        if (not self._in_row and in_a_row != _WARM_UP) or self._session.provider != "native":
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            budget = self._install.budget.bytes if self._automatic else self._next
            waits_for_rounds = self._calls_left is not None and self._peak is None
            if in_a_row < _WARM_UP or not waits_for_rounds or model in self._moved_to or budget is None:
                if self._in_row:
                    self._stop_recording()
                return
            if not self._in_row:
                self._in_row = True
                self._session.record(True)
            self._session.note_pass()
            if in_a_row == _WARM_UP + _MEASURED:
                self._moved_to.add(model)
                self._stop_recording()
                if not self._plan_is_in_use():
                    asked = self._asked
                    self._plan(budget, 0)
                    self._asked = asked  # that plan is for after the rounds
        finally:
            self._lock.release()

    def call_failed(self, error: BaseException) -> None:
        """Lower an automatic budget if the error that ended a call of the model is a lack of memory.

        The call is not repeated, because it may have written to a cache or drawn random numbers.
        """
        if not isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or not self._automatic:
            return
        with self._lock:
            before = self._install.budget.bytes
            if before is None:
                return
            self._stop_recording()
            self._calls_left = self._activations = None
            self._plan(smaller_budget(min(before, self._session.stats()["weight_bytes"])), 0)
            note = (
                f"the budget is {show_budget(self._install.budget.bytes)} from now on, not "
                f"{format_bytes(before)}: the next call has more room"
            )
        if hasattr(error, "add_note"):
            error.add_note(f"dynswap_ext: {note}")
        warn(f"memory ran out in a call of the model: {note}")

    def _count_from(self, calls: int) -> None:
        self._calls_left = calls
        self._passes = _Passes()

    def _step(self) -> None:
        if self._calls_left is None or (self._calls_left > 0 and not self._passes.is_one_more()):
            return
        if self._calls_left == _MEASURED:
            self._in_row = False  # a recording begins here
            self._peak = PeakMemory(self._session.device)
            self._session.record(True)
            self._session.note_pass()
        if self._calls_left > 0:
            self._calls_left -= 1
            return
        if self._automatic and not self._may_plan():
            return
        self._calls_left = None
        activations = self._peak.more() if self._peak is not None else 0
        self._stop_recording()
        self._activations = activations
        self._plan(self._room(activations) if self._automatic else self._next, activations)

    def _may_plan(self) -> bool:
        """Return whether a plan that is due is made now: Note [When a plan is tuned]."""
        self._waited += 1
        if self._asked or not self._plan_is_in_use():
            return True
        return self._waited > _PATIENCE and not self._session.captured

    def _plan_is_in_use(self) -> bool:
        return bool(self._session.captured or self._session.stats()["live_leases"] > 0)

    def _leave_headroom(self, headroom: int) -> None:
        """Plan for less if others have too little of the device, and for more once they have left it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            stats, held = self._session.stats(), self._held()
            room = self._room(self._activations or 0) or 0
            enough = max(1, headroom // _HEADROOM_STEPS)
            # Weights that take less than that leave, too.
            short = min(enough, max(1, held // _HEADROOM_STEPS))
            if room > held - short:
                self._cache_emptied = False
                self._take_more_room(room, held, enough, stats)
            elif self._install.budget.bytes is not None and stats["resident_bytes"]:
                self._more_room = []
                if not self._cache_emptied:  # what torch keeps may be of a pass that was larger than others
                    self._cache_emptied = True
                    DeviceMemory(self._session.device).empty_cache()
                    room = self._room(self._activations or 0) or 0
                if room <= held - short and self._may_plan():
                    logger.info("others need memory: weights leave %s of it", format_bytes(held - room))
                    self._plan_and_measure(room)
                    DeviceMemory(self._session.device).empty_cache()
        finally:
            self._lock.release()

    def _take_more_room(self, room: int, held: int, enough: int, stats: dict[str, int]) -> None:
        more = room - max(held, self._install.budget.bytes or 0, self._too_little)
        grows = (
            not self.measuring
            and self._activations is not None
            and stats["resident_groups"] < stats["groups"]
            and more >= enough
            and not self._plan_is_in_use()
        )
        self._more_room = [*self._more_room, room] if grows else []
        if len(self._more_room) >= _HEADROOM_PATIENCE:
            logger.info("others have left memory: weights take %s of it", format_bytes(more))
            room = min(self._more_room)
            self._plan_and_measure(room)
            self._too_little = room if self._install.budget.bytes is None else 0

    def _plan_and_measure(self, budget: int) -> None:
        """Plan for a budget at once, and measure which residents are best."""
        self._more_room = []
        self._stop_recording()
        self._plan(budget if budget > 0 else None, 0)
        self._count_from(self._warm_up + _MEASURED)

    def _follow_those_who_gave_way(self) -> None:
        """Plan for what is left, and measure again what that could be: later each time."""
        stats = self._session.stats()
        self._warm_up = min(2 * self._warm_up, _MOST_WARM_UP)
        self._plan_and_measure(
            stats["resident_bytes"] + stats["arena_bytes"] if stats["resident_bytes"] else 0
        )

    def _stop_recording(self) -> None:
        if self._peak is not None or self._in_row:
            self._session.record(False)
        self._peak = None
        self._in_row = False

    def _room(self, activations: int) -> int | None:
        """Return the bytes that the measured passes leave for weights."""
        device, held = self._session.device, self._held()
        free = free_bytes(device) - int(_ACTIVATION_MARGIN * activations)
        if self._headroom is None:
            share = _KEPT_FREE.get(device.type, _KEPT_FREE_ON_ACCELERATORS)
            room = free + held - int(share * all_bytes(device))
        else:  # what torch's allocator keeps for activations is nobody else's
            room = min(free, free_for_others(device)) + held - self._headroom
        return room if room > 0 else None

    def _held(self) -> int:
        """Return the bytes of the plan that another one could have."""
        stats = self._session.stats()
        arena = 0 if self._plan_is_in_use() else stats["arena_bytes"]
        return int(stats["resident_bytes"] + arena)

    def _plan(self, budget: int | None, activations: int) -> None:
        root = model_of(self._session)
        if root is None:
            return
        earlier, self._asked, self._waited = self._install.budget.bytes, False, 0
        while True:
            try:
                seen = self._session.retune(root, Budget(budget, self._automatic))
                break
            except (BudgetError, OutOfMemoryError) as error:
                if budget is None:
                    if not self._automatic or isinstance(error, BudgetError):
                        raise
                    why = f"there is no room for a plan now ({error})"
                    warn(f"{why}: weights are copied at each access until there is")
                    self._install.budget = replace(self._install.budget, bytes=None)
                    return
                if isinstance(error, BudgetError) and not self._automatic:
                    warn(
                        f"cannot retune to {format_bytes(budget)} ({error}); the budget is still "
                        f"{show_budget(earlier)}"
                    )
                    return
                most = min(budget, self._session.stats()["weight_bytes"])
                smaller = smaller_budget(most) if isinstance(error, OutOfMemoryError) else None
                failed = f"a budget of {format_bytes(budget)} does not work ({error})"
                warn(f"{failed}; trying {show_budget(smaller)}")
                budget = smaller
        self._install.budget = replace(self._install.budget, bytes=budget)
        before, self._given_way = self._given_way, self._session.given_way_bytes
        given_way = max(0, self._given_way - before)
        self.latest = Tuning(budget=budget, activation_bytes=activations, given_way_bytes=given_way, **seen)
        logger.info(
            "tuned: budget %s (was %s), activations %s, %s had given way; "
            "%d passes of %s compute and %s waits",
            *(show_budget(size) for size in (budget, earlier, activations, given_way)),
            self.latest.passes,
            show_seconds(self.latest.compute_seconds),
            show_seconds(self.latest.wait_seconds),
        )


class _Passes:
    """Counts the passes of several threads: Note [Passes of several threads]."""

    def __init__(self) -> None:
        self._of_thread: Counter[int] = Counter()
        self._most = 0
        #: Passes since the last one that counted.
        self._others = 0

    def is_one_more(self) -> bool:
        """Note that this thread begins a pass, and return whether it is the next pass of the install.

        Of threads that run at the same time, the one that is furthest ahead counts, not each of them.
        """
        thread = threading.get_ident()
        self._of_thread[thread] += 1
        self._others += 1
        if self._of_thread[thread] <= self._most and self._others < _MOST_THREADS:
            return False
        self._most += 1
        self._others = 0
        return True


def smaller_budget(budget: int) -> int | None:
    """Return the next budget to try, in bytes; None: only what `prefetch` needs."""
    smaller = int(_SHRINK * budget)
    return smaller if smaller > 1 << 20 else None
