"""Jobs in processes of their own, which begin in milliseconds.

Importing the libraries takes some seconds, more than measuring a contender does. A server imports them once,
computes nothing, and forks for each job. Where a device cannot be used after a fork, a job's process imports
for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path

from head_to_head.job import Job, Row

_PRELOAD = (
    "torch",
    "numpy",
    "dynswap_ext",
    "dynswap_ext.checkpoint",
    "transformers.models.llama.modeling_llama",
    "diffusers.models.transformers.transformer_flux",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.hooks",
    "accelerate",
    "compressed_tensors.offload",
)
_AFTER_FORK = ("re-initialize CUDA", "initialization error", "CUDA driver error")


def preload() -> None:
    """Import what contenders need. What is not installed, they say themselves."""
    for name in _PRELOAD:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a contender's process does not go through the libraries


class Apart:
    """Runs jobs, one at a time, each in a process of its own with a time limit."""

    def __init__(self, folder: Path, *, fork: bool = True) -> None:
        # torch asks the driver whether there is a device; the server may not have begun to use it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the server does not get sys.path
        self._folder = folder
        self._set_method("forkserver" if fork else "spawn")

    def _set_method(self, method: str) -> None:
        self._method = method
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(["head_to_head.preloaded"])

    def run(self, job: Job, limit: float, *, write: bool = False) -> Row:
        """What came of a job; after `limit` seconds it is ended."""
        row = self._run(job, limit, write)
        if self._method == "forkserver" and any(text in row.failure for text in _AFTER_FORK):
            self._set_method("spawn")
            row = self._run(job, limit, write)
        return row

    def _run(self, job: Job, limit: float, write: bool) -> Row:
        result, log = self._folder / "row.json", self._folder / "log.txt"
        result.unlink(missing_ok=True)
        process = self._context.Process(
            target=_child, args=(dataclasses.asdict(job), str(result), str(log), write)
        )
        process.start()
        process.join(limit)
        late = process.is_alive()
        if late and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # compilers and the like, too
            process.kill()
            process.join()
        if result.exists():
            return Row(**json.loads(result.read_text()))
        if late:
            return Row(failure=f"was not done after {limit:.0f} s, and ended")
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return Row(failure=(lines or [f"ended with status {process.exitcode}"])[-1][:300])


def _child(job: dict[str, object], result: str, log: str, write: bool) -> None:
    os.setpgid(0, 0)
    # By descriptor: what libraries written in C++ say goes there too.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    from head_to_head.measure import measure, write_checkpoint

    try:
        row = (write_checkpoint if write else measure)(Job(**job))  # type: ignore[arg-type]
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        row = Row(failure=f"{type(error).__name__}: {text}"[:300])
    part = Path(f"{result}.part")
    part.write_text(json.dumps(dataclasses.asdict(row)))
    part.rename(result)
    sys.stdout.flush()
