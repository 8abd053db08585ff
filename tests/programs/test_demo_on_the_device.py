"""The package's demo on a device, as a user runs it. test_cli.py runs it on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ENGINE, PRETEND, skip_or_fail

_ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return an environment whose processes have this one's device."""
    added = {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    if PRETEND:
        folders = (_ROOT / "tests" / "device" / "startup", _ROOT / "tests" / "device")
        added["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    return os.environ | added


@pytest.mark.device
def test_demo(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    options = ["--size", "8MB", "--share", "1/2", "--passes", "2", "--tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "dynswap_ext", "demo", *options, "--folder", str(tmp_path / "cache")],
        cwd=_ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # it is 1 if outputs differ
    assert re.search(r"^device +cuda", done.stdout, re.MULTILINE)
    assert f"(native, {ENGINE})" in done.stdout
    moved = re.search(r"moved a pass +- +([\d.]+) MiB", done.stdout)
    assert moved is not None and float(moved[1]) > 3, done.stdout  # the model has 7.6 MiB
