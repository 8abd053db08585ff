"""Jobs in processes of their own that start within milliseconds.

Importing the libraries takes some seconds, more than measuring a baseline does. A server imports them once,
computes nothing, and forks for each job. If a device cannot be used after a fork, a job's process does its
own imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from pathlib import Path

from dynswap_ext.errors import DynswapError
from head_to_head.job import Job, Row
from isolated import Isolated

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
    """Import what baselines need. A baseline itself reports what is not installed."""
    for name in _PRELOAD:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a baseline's process does not go through the libraries


class Apart:
    """Runs jobs, one at a time, each in a process of its own with a time limit."""

    def __init__(self, *, fork: bool = True) -> None:
        # Let torch ask the driver whether there is a device: the server may not start to use one.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the server does not get sys.path
        self._isolated = Isolated("forkserver", ["head_to_head.preloaded"]) if fork else Isolated()

    def run(self, job: Job, limit: float, *, write: bool = False) -> Row:
        """Do a job, and kill its process after `limit` seconds."""
        row = self._run(job, limit, write)
        if any(text in row.failure for text in _AFTER_FORK):
            self._isolated = Isolated()
            row = self._run(job, limit, write)
        return row

    def _run(self, job: Job, limit: float, write: bool) -> Row:
        try:
            return self._isolated.run(_write if write else _measure, job, limit=limit)
        except (DynswapError, TimeoutError) as error:
            return Row(failure=str(error).splitlines()[-1][:300])


def _measure(job: Job) -> Row:
    from head_to_head.measure import measure

    return measure(job)


def _write(job: Job) -> Row:
    from head_to_head.measure import write_checkpoint

    return write_checkpoint(job)
