"""Builds a pretend device, and runs a command over it: ``python -m pretend_cuda [--mutants] command...``.

DYNSWAP_TEST_DEVICE names the kind of device (`KINDS` in _build.py). On a machine that cannot have it, prints
why and leaves the command out; with DYNSWAP_CUDA=1 that is a failure.
"""

from __future__ import annotations

import os
import sys

from . import _build


def main(arguments: list[str]) -> int:
    mutants = arguments[:1] == ["--mutants"]
    command = arguments[mutants:]
    try:
        _build.build(_build.wanted(), mutants)
    except _build.Unavailable as why:
        print(f"left out, since there is no pretend device here: {' '.join(command)}\n  {why}", flush=True)
        return int(os.environ.get("DYNSWAP_CUDA") == "1")
    if command:
        os.execvp(command[0], command)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
