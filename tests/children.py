"""Runs Python code in child processes, forked from one that has already imported torch and the package.

An import takes more than a second of CPU, and most tests need it only once: their child ends, crashes, has a
limit, or has memory of its own. A test of the import itself, or of an environment variable that is read
during it, has to start a process itself.
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
    """Run code as ``python -c code arguments...`` does, and return its exit status and what it printed.

    `env` is its whole environment, except that Python and torch have read theirs already. After `timeout`
    seconds the child is killed and TimeoutError raised, with what it printed and where each of its threads
    was.
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
    """Return the next line of the server. If none comes within `timeout` seconds, end it and return None."""
    assert server.stdout is not None
    if select.select([server.stdout], [], [], timeout)[0]:
        return server.stdout.readline()
    _end(server, signal.SIGABRT)  # makes faulthandler print where each thread is
    return None


def _end(server: subprocess.Popen[str], by: signal.Signals = signal.SIGKILL) -> None:
    if server in _servers:
        _servers.remove(server)
        os.killpg(server.pid, by)
        server.communicate()


def _serve() -> tuple[str, ModuleType]:
    """Fork for each request. Return in the child, with the code to run and the module to run it in."""
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
