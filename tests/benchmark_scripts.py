"""Runs a script of benchmarks/ as its user does. Its import makes the modules of benchmarks/ importable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of benchmarks/ with this checkout, on one thread, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
