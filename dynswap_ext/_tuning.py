"""Measures passes, and chooses by them which weights stay: for `budget="auto"` and `Handle.retune`.

Note [When a plan is tuned]: the first pass of a model is not typical: every weight is copied for the first
time, kernels are chosen, caches are filled. So one pass goes by, the next ones are recorded, and the plan is
made at the beginning of the pass after them. Unless `Handle.retune` has asked for the plan, it waits until no
weight is in use: weights of the old plan that other threads or kept tensors hold would be on the device
together with those of the new plan. If threads take turns, or tensors are kept, that may never happen. So
after some passes the plan is made anyway, for the memory that these cannot hold. If a CUDA graph has captured
weights, it would look for them at their old addresses, so then the plan waits without a limit.

Note [Steps within a round]: if several models share an install, a pass is a round, and the first round of a
pipeline may take minutes. If it calls one of the models several times in a row, such as a denoiser, these
calls are measured like passes, and weights of that model stay on the device from then on. The budget stays as
it is: only whole rounds show how much memory the activations of all models take.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Protocol

import torch

from dynswap_ext._rounds import Passes
from dynswap_ext._saved_plan import SavedPlan, Tuning
from dynswap_ext._swap.module_registry import model_of
from dynswap_ext._swap.protocol import Session
from dynswap_ext._util.device_memory import DeviceMemory
from dynswap_ext._util.log import logger
from dynswap_ext._util.memory import all_bytes, format_bytes, free_bytes, free_for_others, share_of_saved
from dynswap_ext._util.peak_memory import PeakMemory
from dynswap_ext._util.units import show_budget, show_seconds
from dynswap_ext._util.warn import warn
from dynswap_ext.config import Budget, Options
from dynswap_ext.errors import BudgetError, OutOfMemoryError

#: Passes that go by before any is measured. After residents had to give way, more go by.
_WARM_UP = 1
_MOST_WARM_UP = 64
#: Passes that are measured.
_MEASURED = 2
#: Passes of all threads for which a plan that is due waits at most: Note [When a plan is tuned].
_PATIENCE = 64

#: By this factor, more memory is left for activations than was measured, as they differ from pass to pass.
_ACTIVATION_MARGIN = 1.1
#: The share of the device's memory that stays free for uses that are not measured, such as fragmentation and
#: other programs.
_KEPT_FREE = {"cpu": 0.1}
_KEPT_FREE_ON_ACCELERATORS = 0.03
#: A difference counts if it is at least the headroom divided by this.
_HEADROOM_STEPS = 8
#: Passes in which others have to leave memory free before weights take it.
_HEADROOM_PATIENCE = 8
#: A budget that was too large is multiplied by this.
_SHRINK = 0.75


class HasBudget(Protocol):
    """The attributes of an install that its tuner needs."""

    session: Session
    options: Options
    saved_plan: SavedPlan | None
    #: The budget with which plans are made. The tuner changes it.
    budget: Budget


class Tuner:
    """Measures the passes of an install, and makes a new plan once it has measured enough. Thread-safe."""

    def __init__(self, install: HasBudget) -> None:
        #: Weak, because the install owns the tuner, and a reference cycle would keep both alive.
        self._install: HasBudget = weakref.proxy(install)
        self._session = install.session
        self._lock = threading.Lock()
        # LOCK: guards all below, and changes of the install's budget.
        #: Bytes of the next plan, unless its budget is automatic.
        self._next = install.budget.bytes
        saved = install.saved_plan
        #: Passes until the next plan is made; None if none is to be measured.
        self._calls_left: int | None = _WARM_UP + _MEASURED if self._automatic and saved is None else None
        self._passes = Passes()
        #: Passes for which a plan that is due has waited.
        self._waited = 0
        self._peak: PeakMemory | None = None
        #: Most bytes that a measured pass saved for backward.
        self._saved = 0
        self.latest = None if saved is None else saved.tuning
        self._warm_up = _WARM_UP
        #: Whether calls of one model in a row are recorded: Note [Steps within a round].
        self._in_row = False
        #: Models whose calls in a row have led to a plan since `measure` was called last.
        self._moved_to: set[str] = set()
        #: Whether `Handle.retune` asked for the next plan.
        self._asked = False
        #: Bytes of residents that had given way at the time of the latest plan, as the session counts them.
        self._given_way = 0
        #: Bytes that are left to others, which each pass checks; None if `headroom` was not given.
        self._headroom = install.options.headroom
        #: Bytes that activations took in the latest measured passes; None if that is not known, or if memory
        #: has run out since.
        self._activations = None if self.latest is None else self.latest.activation_bytes
        #: Bytes that weights could take in each of the latest passes, as long as they exceed the plan's.
        self._more_room: list[int] = []
        #: Bytes that were too few for a plan; 0 if there was one.
        self._too_little = 0
        #: Whether torch's cache was emptied because others had too little, and they have too little still.
        self._cache_emptied = False

    @property
    def measuring(self) -> bool:
        """Whether passes are being measured, or will be, for a new plan."""
        return self._calls_left is not None

    @property
    def _automatic(self) -> bool:
        return self._install.budget.automatic

    def measure(self, budget: Budget) -> None:
        """Measure the next passes, then plan: for this budget or, if it is automatic, for what they leave."""
        with self._lock:
            self._stop_recording()
            self._next = budget.bytes
            self._install.budget = replace(self._install.budget, automatic=budget.automatic)
            self._moved_to.clear()
            self._asked = True
            self._count_from(_WARM_UP + _MEASURED)

    def follow(self, earlier: Tuner) -> None:
        """Continue for the tuner of an earlier session of the same install, with the same budget.

        The measurements of that session are lost. If it had any, or was asked for them, passes are measured
        again.
        """
        self.latest = earlier.latest
        if earlier.latest is not None or earlier._asked:
            present = self._install.budget
            self.measure(present if earlier._calls_left is None else replace(present, bytes=earlier._next))

    def begin_again(self) -> None:
        """Measure from the first pass on again, because the present pass calls a model for the first time."""
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
        """Note that a pass begins, and plan if that is due.

        A pass is a call of the model, or a round of all models that share the install. If another thread
        plans at this moment, this one goes on with the present plan.
        """
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
        """Note a call of one of several models, which directly follows `in_a_row` calls of the same model.

        See Note [Steps within a round].
        """
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
                    self._asked = asked  # the plan that `measure` asks for comes after whole rounds
        finally:
            self._lock.release()

    def call_failed(self, error: BaseException) -> None:
        """Lower an automatic budget if the error that ended a call of the model is a lack of memory.

        The call is not repeated, because it may have written to a cache or drawn random numbers.
        """
        if not isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or not self._automatic:
            return
        with self._lock:
            before, bound = self._install.budget.bytes, self._install.budget.activations
            lowers = self._install.options.measures_activations and bound is not None
            if before is None and not lowers:
                return
            self._stop_recording()
            self._calls_left = self._activations = None
            if bound is not None and lowers:
                smaller = max(1, int(_SHRINK * bound))
                self._install.budget = replace(self._install.budget, activations=smaller)
            if before is None:
                return self._plan(None, 0)
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
        self._passes = Passes()

    def _step(self) -> None:
        if self._calls_left is None or (self._calls_left > 0 and not self._passes.is_one_more()):
            return
        self._saved = max(self._saved, self._session.stats().get("saved_step_bytes", 0))
        if self._calls_left == _MEASURED:
            self._saved = 0
            self._in_row = False  # its recording ends, as another one begins here
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
        budget = self._room_for_weights(activations) if self._automatic else self._next
        self._plan(budget, self._activations)

    def _may_plan(self) -> bool:
        """Return whether a plan that is due is made in this pass: Note [When a plan is tuned]."""
        self._waited += 1
        if self._asked or not self._plan_is_in_use():
            return True
        return self._waited > _PATIENCE and not self._session.captured

    def _plan_is_in_use(self) -> bool:
        return bool(self._session.captured or self._session.stats()["live_leases"] > 0)

    def _leave_headroom(self, headroom: int) -> None:
        """Plan for less if others have too little of the device, and for more once they have freed some."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            stats, held = self._session.stats(), self._held()
            room = self._room(self._activations or 0) or 0
            enough = max(1, headroom // _HEADROOM_STEPS)
            # Where weights take less than `enough`, a smaller difference counts, so that these leave, too.
            short = min(enough, max(1, held // _HEADROOM_STEPS))
            if room > held - short:
                self._cache_emptied = False
                self._take_more_room(room, held, enough, stats)
            elif self._install.budget.bytes is not None and stats["resident_bytes"]:
                self._more_room = []
                if not self._cache_emptied:  # torch may keep memory of a pass that was larger than others
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
        """Plan for a budget at once, and measure passes for a better choice of what stays on the device."""
        self._more_room = []
        self._stop_recording()
        self._plan(budget if budget > 0 else None, 0)
        self._count_from(self._warm_up + _MEASURED)

    def _follow_those_who_gave_way(self) -> None:
        """Plan for the memory that weights have left after residents gave way, and measure passes again.

        Each time that this happens, twice as many passes go by before any is measured.
        """
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
        """Return the bytes that activations of this size leave for weights; None if they leave none."""
        device, held = self._session.device, self._held()
        free = free_bytes(device) - int(_ACTIVATION_MARGIN * activations)
        if self._headroom is None:
            share = _KEPT_FREE.get(device.type, _KEPT_FREE_ON_ACCELERATORS)
            room = free + held - int(share * all_bytes(device))
        else:  # memory that torch's allocator keeps for activations is not free for others
            room = min(free, free_for_others(device)) + held - self._headroom
        return room if room > 0 else None

    def _room_for_weights(self, activations: int) -> int | None:
        """Return what measured activations leave for weights.

        If the install trades one for the other, choose how much of what is saved for backward stays.
        """
        stats = self._session.stats()
        saved = int(_ACTIVATION_MARGIN * self._saved)
        # What no bound moves.
        others = max(0, activations - min(stats["saved_bytes"], self._install.budget.activations or 0))
        room = self._room(others)
        if not self._install.options.measures_activations or not saved or room is None:
            return self._room(activations)
        share = share_of_saved(room, stats["weight_bytes"], saved)
        self._install.budget = replace(self._install.budget, activations=max(1, share))
        self._activations = others + share
        return room - share if room > share else None

    def _held(self) -> int:
        """Return the bytes of the present plan that a new plan could take over."""
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
                seen = self._session.retune(root, replace(self._install.budget, bytes=budget))
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


def smaller_budget(budget: int) -> int | None:
    """Return the next smaller budget to try, in bytes; None for only what `prefetch` needs."""
    smaller = int(_SHRINK * budget)
    return smaller if smaller > 1 << 20 else None
