"""Finds where passes begin that are measured, if several models share an install or several threads call it.

If several models share an install, a pass is one round of all of them. A pipeline calls its text encoder
once, its denoiser thirty times and its decoder once. The whole round is measured, because it decides how much
a weight saves by staying on the device. No program says where a round begins, so that is inferred from the
calls: a round begins when all models that take part have been called, and one of them is called again after
another.

Note [Passes of several threads]: threads that call the model at the same time share the bus and the device,
so they are measured together. A pass counts if its thread has then made more passes than any thread before;
meanwhile each of the other threads makes about as many. Where each thread makes only one pass, none would
count after the first. So a pass also counts after many that did not.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final, NamedTuple

#: If a model is called this many times in a row, or more than twice as often as in any earlier row of calls,
#: it is taken for a loop of its own, in which each call is a pass.
_LOOP: Final = 64
#: After this many returns to models that the round has called before, it no longer waits for models that it
#: has not called.
_RETURNS: Final = 16
#: So many calls in a row have different numbers; later ones share the last number.
_MOST_IN_A_ROW: Final = 1024
#: If so many passes in a row would not count, the last of them does: Note [Passes of several threads].
_MOST_THREADS: Final = 64


class RoundCall(NamedTuple):
    """One call of one of the models that share an install."""

    begins_round: bool
    #: Whether the model had never been called before.
    is_new: bool
    #: For the schedule: identifies the model and how often it was called in a row. Begins with 1.
    number: int
    #: The number of calls of the same model directly before this one.
    in_a_row: int


class Rounds:
    """Follows the calls of models that share an install, in the order in which they begin on all threads."""

    def __init__(self) -> None:
        self._ever: set[str] = set()
        #: Models that a round is expected to call.
        self._expected: set[str] = set()
        #: Models that the present round has called.
        self._called: set[str] = set()
        #: The model that was called last, and how many of its calls came directly before that call.
        self._latest: str | None = None
        self._in_a_row = 0
        #: By model: the largest number of its calls in a row before another model was called.
        self._longest: dict[str, int] = {}
        #: How often the present round has returned to a model that it had called before.
        self._returns = 0
        #: By model and place in a row of its calls: the number of such a call.
        self._numbers: dict[tuple[str, int], int] = {}

    def call(self, model: str) -> RoundCall:
        """Note a call of the model with this name, and return what it means for rounds."""
        is_new, again, returns = model not in self._ever, model == self._latest, model in self._called
        self._ever.add(model)
        self._expected.add(model)
        if not again and self._latest is not None:
            self._longest[self._latest] = max(self._longest.get(self._latest, 0), self._in_a_row + 1)
        self._in_a_row = self._in_a_row + 1 if again else 0
        self._latest = model
        if again and self._in_a_row >= min(_LOOP, 2 * self._longest.get(model, _LOOP) + 2):
            self._expected = {model}
        elif returns and not again:
            self._returns += 1
            if self._returns > _RETURNS:
                self._expected = self._called.copy()
        alone = self._expected == {model}
        begins = not self._called or (returns and self._expected <= self._called and (alone or not again))
        if begins:
            self._called.clear()
            self._returns = 0
        self._called.add(model)
        key = model, min(self._in_a_row, _MOST_IN_A_ROW - 1)
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        return RoundCall(begins, is_new, number, self._in_a_row)


class Passes:
    """Tells which passes of several threads count: Note [Passes of several threads]."""

    def __init__(self) -> None:
        self._of_thread: Counter[int] = Counter()
        self._most = 0
        #: Passes that did not count since the last one that did.
        self._others = 0

    def is_one_more(self) -> bool:
        """Note that this thread begins a pass, and return whether the pass counts."""
        thread = threading.get_ident()
        self._of_thread[thread] += 1
        self._others += 1
        if self._of_thread[thread] <= self._most and self._others < _MOST_THREADS:
            return False
        self._most += 1
        self._others = 0
        return True
