"""Shows the progress of the first pass of an install.

A thread reads the counters several times a second, so that accesses cost no more than without it. It ends
with the pass, once every group of weights has arrived, or with the install.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from torch import nn

from dynswap_ext._swap.protocol import Session
from dynswap_ext._swap.state import session_of
from dynswap_ext._util.progress import ProgressOption, shown

#: Seconds between readings.
_INTERVAL_S: Final = 0.1
#: The pass is over if for so many seconds no weight was accessed and no module was being called. (A compiled
#: graph calls no module.)
_QUIET_S: Final = 1.0
_CALL: Final = nn.Module._call_impl.__code__


class FirstPass:
    """Shows the progress of a session's first pass, until all groups of weights have arrived."""

    def __init__(self, session: Session, lives: Callable[[], bool], progress: ProgressOption) -> None:
        self._session, self._lives, self._progress = session, lives, progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynswap_ext first pass")
        self._thread.start()

    def stop(self) -> None:
        """Stop showing progress, and wait for the thread to end, for at most 10 seconds."""
        self._over.set()
        if self._thread is not threading.current_thread():
            # Without a limit this could wait forever: the user's function may wait for the calling thread.
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        while self._accesses() == 0:
            if self._gone():
                return
        with shown(self._progress, "first pass") as tell:
            if tell is None:
                return
            before, last = -1, time.monotonic()
            while time.monotonic() - last <= _QUIET_S:
                groups = self._session.groups()
                came = [group["bytes"] for group in groups if group["copies"]]
                tell(sum(came), sum(group["bytes"] for group in groups))
                if len(came) == len(groups) or self._gone():
                    break
                now = self._accesses()
                if now != before or _inside_call(self._session):
                    before, last = now, time.monotonic()

    def _gone(self) -> bool:
        """Wait for the next reading, and return whether the install or the program has ended."""
        stopped = self._over.wait(_INTERVAL_S)
        return stopped or not self._lives() or not threading.main_thread().is_alive()

    def _accesses(self) -> int:
        counters = self._session.stats()
        return counters["hits"] + counters["misses"]


def _inside_call(session: Session) -> bool:
    """Return whether any thread is inside the call of a module that the session serves."""
    return any(
        frame.f_code is _CALL and session_of(frame.f_locals["self"]) is session
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
    )
