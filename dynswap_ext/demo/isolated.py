"""Runs functions, each in a process of its own, so that its peak memory is its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from dynswap_ext.errors import DynswapError

__all__ = ["Isolated", "ProcessError"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_LINES = 15


class ProcessError(DynswapError):
    """A process ended without a result; the message ends with what it wrote last."""


class Isolated:
    """Starts a process for each call, one at a time.

    Parameters
    ----------
    method
        Of `multiprocessing`: "spawn" imports everything again, "forkserver" forks a server.
    preload
        Modules that the server imports before it forks.
    """

    def __init__(self, method: str = "spawn", preload: Sequence[str] = ()) -> None:
        self._context: Any = multiprocessing.get_context(method)
        if preload:
            self._context.set_forkserver_preload(list(preload))

    def run(
        self,
        function: Callable[[_Job, Callable[[], None]], _Result],
        job: _Job,
        *,
        step: Callable[[], None] = lambda: None,
        limit: float | None = None,
    ) -> _Result:
        """Call ``function(job, step)`` there, and return what it returns.

        Parameters
        ----------
        function, job
            Picklable, as the result is.
        step
            Called here for each call of `step` there.
        limit
            Seconds between steps after which the process is ended.

        Raises
        ------
        DynswapError
            As `function` raised it, with its message.
        ProcessError
            It raised another exception, or the process ended.
        TimeoutError
            The process was ended by `limit`.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            process = self._context.Process(target=_child, args=(function, job, sender, str(log)))
            process.start()
            sender.close()
            try:
                while receiver.poll(limit):
                    kind, value = receiver.recv()
                    if kind == "result":
                        process.join()
                        return value  # type: ignore[no-any-return]
                    if kind == "error":
                        raise value
                    step()
                raise TimeoutError(f"was not done after {limit:.0f} s, and was ended")
            except EOFError:
                process.join()
                tail = log.read_text(errors="replace").strip().splitlines()[-_LINES:] if log.exists() else []
                lines = "\n".join([f"ended with status {process.exitcode}:", *tail])
                raise ProcessError(lines) from None
            finally:
                _end(process)


def _end(process: Any) -> None:
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its compilers and the like, too
        process.kill()
    process.join()


def _child(function: Callable[..., Any], job: Any, sender: Connection, log: str) -> None:
    os.setpgid(0, 0)
    # By descriptor: what libraries written in C++ write goes there too.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        result = function(job, lambda: sender.send(("step", None)))
    except DynswapError as error:
        sender.send(("error", error))
    else:
        sender.send(("result", result))
    sys.stdout.flush()
