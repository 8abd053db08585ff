"""Shows how far the first pass of an install is.

A thread looks at counters some times a second, so that accesses cost what they always do. It ends with the
pass, or once every group has come, or with the install.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from ._progress import ProgressOption, shown
from ._provider import Session
from ._state import session_of

__all__ = ["FirstPass"]

_INTERVAL_S: Final = 0.1
#: A pass that nobody can be seen in (it may be a compiled graph) is over after so long without an access.
_QUIET_S: Final = 1.0
_CALL: Final = nn.Module._call_impl.__code__


class FirstPass:
    """Watches a session until all its groups were used once.

    Parameters
    ----------
    session
        The session.
    lives
        Returns whether the session still serves any module.
    progress
        True for a bar, or a function, which the thread calls.
    """

    def __init__(self, session: Session, lives: Callable[[], bool], progress: ProgressOption) -> None:
        self._session, self._progress = session, progress
        self._lives = lives
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynswap_ext first pass")
        self._thread.start()

    def stop(self) -> None:
        """Show nothing any more; the thread is gone when this returns."""
        self._over.set()
        if self._thread is not threading.current_thread():
            # In the end without it: the function that it calls may itself wait for this one.
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        while self._accesses() == 0:
            if self._gone(_INTERVAL_S):
                return
        with shown(self._progress, "first pass") as tell:
            if tell is None:
                return
            seen, last = -1, time.monotonic()
            while True:
                done, whole, all_came = self._arrived()
                tell(done, whole)
                if all_came or self._gone(_INTERVAL_S):
                    break
                now = self._accesses()
                if now != seen or _inside_call(self._session):
                    seen, last = now, time.monotonic()
                elif time.monotonic() - last > _QUIET_S:
                    break

    def _gone(self, wait: float) -> bool:
        stopped = self._over.wait(wait)
        return stopped or not self._lives() or not threading.main_thread().is_alive()

    def _accesses(self) -> int:
        counters = self._session.stats()
        return counters["hits"] + counters["misses"]

    def _arrived(self) -> tuple[int, int, bool]:
        groups = self._session.groups()
        came = [group["bytes"] for group in groups if group["copies"]]
        return sum(came), sum(group["bytes"] for group in groups), len(came) == len(groups)


def _inside_call(session: Session) -> bool:
    """Whether any thread is inside the call of a module that the session serves."""
    for frame in sys._current_frames().values():
        at: Any = frame
        while at is not None:
            if at.f_code is _CALL and session_of(at.f_locals["self"]) is session:
                return True
            at = at.f_back
    return False
