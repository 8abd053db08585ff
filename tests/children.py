"""Processes that tests start: forks of one that has imported torch and the package already.

An import takes more than a second of CPU, and most children need no more of a process than that it is not
the test's: an end, a crash, a limit, memory of its own. What a test asks of an import itself, or of a
variable that is read then, takes a process from nothing.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent

_servers: list[subprocess.Popen[str]] = []


def run(
    code: str, *arguments: object, env: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run the code as ``python -c code arguments...`` does, and return how it ended and what it printed.

    `env` is its whole environment, but for what Python and torch read as they start. After `timeout` seconds
    it is ended, and what it printed is in the error, with where each of its threads was.
    """
    server = _server()
    assert server.stdin is not None
    command = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder, "out"), Path(folder, "err")]
        asked = [code, command, dict(os.environ) if env is None else env, os.getcwd(), *map(str, written)]
        print(json.dumps(asked), file=server.stdin, flush=True)
        status = _answer(server, timeout)
        printed = [path.read_text() if path.exists() else "" for path in written]
        if status is None:
            raise TimeoutError("\n".join([f"the child has not ended within {timeout} seconds:", *printed]))
        return subprocess.CompletedProcess(command, int(status), *printed)


def _server() -> subprocess.Popen[str]:
    if not _servers:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # one signal ends it and its child
        )
        _servers.append(server)
        atexit.register(_end, server)
        assert _answer(server, timeout=600) == "ready\n"  # its start is not the child's time
    return _servers[0]


def _answer(server: subprocess.Popen[str], timeout: float) -> str | None:
    """Return what the server says next; None if it has said nothing in that time, and is ended."""
    assert server.stdout is not None
    if select.select([server.stdout], [], [], timeout)[0]:
        return server.stdout.readline()
    _end(server, signal.SIGABRT)  # of which faulthandler tells
    return None


def _end(server: subprocess.Popen[str], by: signal.Signals = signal.SIGKILL) -> None:
    if server in _servers:
        _servers.remove(server)
        os.killpg(server.pid, by)
        server.communicate()


def _serve() -> tuple[str, ModuleType]:
    """Fork for each request; return in the child, with its code and the module to run it in."""
    import dynswap_ext.checkpoint  # noqa: F401  (which imports torch)

    if "pretend_cuda" in sys.modules:
        import torch._dynamo  # noqa: F401  (seconds, and that device's first operator imports it)

    gc.freeze()  # what the children share: they need not look through it, and at their end not copy it
    print("ready", flush=True)
    for line in sys.stdin:
        code, command, environment, folder, out, err = json.loads(line)
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        for number, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, out, os.O_WRONLY),
            (2, err, os.O_WRONLY),
        ):
            file = os.open(path, flags | os.O_CREAT)
            os.dup2(file, number)
            os.close(file)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.enable()
        sys.argv = command
        sys.modules["__main__"] = main = ModuleType("__main__")
        return code, main
    sys.exit()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    code, main = _serve()
    exec(compile(code, "<string>", "exec"), main.__dict__)  # at the end of the program: it ends as any does
