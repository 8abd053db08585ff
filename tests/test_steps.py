"""`make test` shows its progress, and ends with a line of what ran, what was skipped and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steps

#: What compilers and C++ tests print: of these lines, the summary has the first three.
UNSOUND = (
    "tests/cpp/test_arena.cpp:12: EXPECT_EQ failed",
    "FAIL arena_has_room (0.10 s)",
    "SUMMARY: AddressSanitizer: heap-use-after-free arena.cpp:5 in place",
    "csrc/core/arena.cpp:5:7: warning: unused variable",
    "ok   arena_is_empty (0.00 s)",
)
MAKEFILE = f"""
tests: ; @{sys.executable} -m pytest -q -p no:cacheprovider test_some.py
lint: ; @echo 'All checks passed!'
broken: ; @echo 'a line of its own'; exit 3
unsound: ; @printf '%s\\n' {" ".join(map(repr, UNSOUND))}; exit 1
setting: ; @test "$(SEEDS)" = 2
"""
CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(steps.__file__).parent)!r})
import pytest
import steps
pytest_configure = pytest.hookimpl(tryfirst=True)(steps.write_report)
"""
TESTS = """
import pytest
def test_one(): pass
@pytest.mark.parametrize("i", range(3))
def test_gpu(i): pytest.skip("there is no GPU")
def test_other(): pytest.skip("too old")
def test_wrong(): assert 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    environment = {key: value for key, value in os.environ.items() if key not in (steps.REPORTS, "MAKEFLAGS")}
    done = subprocess.run(
        [sys.executable, steps.__file__, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_ran_how_far_it_is_and_what_was_skipped_and_why(folder: Path) -> None:
    status, said = run(folder, "all", "broken", "SEEDS=2", "setting", "lint", "tests")
    begun = re.findall(r"^== \d of .*$", said, re.MULTILINE)
    made = ("broken", "setting", "lint", "tests")
    assert begun == [f"== {number} of 4: make {name}" for number, name in enumerate(made, 1)]
    assert "== broken: FAILED in 0 s" in said and "== setting: ok in 0 s" in said
    assert "== lint: ok in 0 s; All checks passed!" in said
    assert status == 1 and "FAILED test_some::test_wrong" in said.splitlines()
    last = said.splitlines()[-1]
    assert last.startswith("== all: FAILED (broken, tests) in 0 min ")
    assert last.endswith("; 1 passed, 1 failed, 4 skipped (3: there is no GPU; 1: too old)")


def test_what_failed_in_c_plus_plus_is_in_the_summary(folder: Path) -> None:
    status, said = run(folder, "all", "unsound")
    assert status == 1
    assert f"== unsound: FAILED in 0 s; {'; '.join(UNSOUND[:3])}" in said.splitlines()
