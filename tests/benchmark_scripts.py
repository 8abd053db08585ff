"""Runs a script of benchmarks/ as its user does, and lets tests import what stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this checkout, on one thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
