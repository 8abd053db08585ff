"""A test that fails leaves nothing behind for later tests. One that passes must leave nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

PROGRAM = '''
import pytest
import torch
from torch import nn

KEPT = []

def held(provider, model):
    provider.install(model, dtype=torch.float64, budget="1GiB")
    model(provider.randn(2, 8))
    return model.weight

def still_live():
    """Live leases, by the handles of the tests before."""
    return [handle.stats().live_leases for handle in HANDLES]

HANDLES = []

def test_fails_and_holds(provider):
    tensor = held(provider, nn.Linear(8, 8))
    HANDLES.extend(provider.handles)
    assert tensor is None

def test_fails_in_a_chain(provider):
    tensor = held(provider, nn.Linear(8, 8))
    HANDLES.extend(provider.handles)
    try:
        deeper(tensor)
    except RuntimeError as error:
        raise ValueError("in the test") from error

def deeper(tensor):
    again = tensor.view(-1)
    raise RuntimeError("deeper")

def test_fails_and_keeps(provider):
    KEPT.append(held(provider, nn.Linear(8, 8)))
    raise ValueError("what it keeps is no second error")

def test_starts_from_nothing(provider):
    assert len(HANDLES) and not any(still_live())
    model = nn.Linear(8, 8)
    tensor = held(provider, model)
    del tensor

def test_passes_and_leaks(provider):
    KEPT.append(held(provider, nn.Linear(8, 8)))
'''


def test_neighbours(tmp_path: Path) -> None:
    program = tmp_path / "test_program.py"
    program.write_text(PROGRAM)
    arguments = [
        "-p",
        "conftest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rA",
        "--tb=short",
        "-k",
        "native-host",
        "--rootdir",
        tmp_path,
    ]
    # The outer run may leave out providers (DYNSWAP_PROVIDER=python leaves out `native-host`).
    own = {key: value for key, value in os.environ.items() if not key.startswith("DYNSWAP_")}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, program],
        capture_output=True,
        text=True,
        env={**own, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path,
        timeout=300,
    )
    told = set(re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)\[", result.stdout, re.M))
    failing = ("test_fails_and_holds", "test_fails_in_a_chain", "test_fails_and_keeps")
    # A test that leaks passes; its fixture reports the error.
    assert told == {
        *(("FAILED", name) for name in failing),
        ("PASSED", "test_starts_from_nothing"),
        ("PASSED", "test_passes_and_leaks"),
        ("ERROR", "test_passes_and_leaks"),
    }, result.stdout + result.stderr
    assert "1 handed-out tensors still hold their place on the device" in result.stdout
