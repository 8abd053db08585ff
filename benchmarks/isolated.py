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

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_LINES = 15


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

    def run(self, function: Callable[[_Job], _Result], job: _Job, *, limit: float | None = None) -> _Result:
        """Call ``function(job)`` in a new process, and return its result.

        Function, job and result are pickled.

        Raises
        ------
        DynswapError
            `function` has raised it, or another exception, or the process has ended.
            For the last two, the text is the last that the process wrote.
        TimeoutError
            The process was killed after `limit` seconds.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log")
            process = self._context.Process(target=_child, args=(function, job, sender, log))
            process.start()
            sender.close()
            try:
                if not receiver.poll(limit):
                    raise TimeoutError(f"was not done after {limit:.0f} s, and was ended")
                result, error = receiver.recv()
                if error is not None:
                    raise error
                process.join()
                return result  # type: ignore[no-any-return]
            except EOFError:
                process.join()
                tail = log.read_text(errors="replace").strip().splitlines()[-_LINES:] if log.exists() else []
                lines = "\n".join([f"ended with status {process.exitcode}:", *tail])
                raise DynswapError(lines) from None
            finally:
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)  # its compilers and the like, too
                    process.kill()
                process.join()


def _child(function: Callable[..., Any], job: Any, sender: Connection, log: Path) -> None:
    os.setpgid(0, 0)
    with log.open("wb") as file:  # by descriptor, so that output of C++ libraries goes there too
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        sender.send((function(job), None))
    except DynswapError as error:
        sender.send((None, error))
    sys.stdout.flush()
