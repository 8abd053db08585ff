"""Everything that the project's own commands install has its version in constraints.txt."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import benchmark_scripts  # noqa: F401  (the folder that the next one is in)

import lock  # isort: skip

ROOT = lock.ROOT
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
#: All targets of the Makefile, and a file that it makes if the system has no CMake.
_PHONY = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
TARGETS = [*(_PHONY[1].split() if _PHONY else []), "build/no/bin/cmake"]


def commands_of(makefile: Path) -> list[str]:
    """Return the commands that make would run in a new clone, for all tests and for those of `make test`."""
    options = ["--always-make", "--dry-run", "--no-print-directory"]
    found = []
    for quick in ("", "1"):
        made = subprocess.run(
            ["make", *options, "-f", makefile, *TARGETS, "VENV=build/no"],
            cwd=ROOT,
            env={**os.environ, "MAKEFLAGS": "", "QUICK": quick},
            capture_output=True,
            text=True,
            check=True,
        )
        found += made.stdout.replace("\\\n", " ").splitlines()
    return found


def unlocked(commands: list[str]) -> list[str]:
    """Return the commands that may install versions that the lock does not name."""
    found = []
    for whole in commands:
        for command in re.split(r"&&|\|\|?|;", whole):
            if re.search(r"\bpip3?\b.* install\b", command):
                locked = "--constraint constraints.txt" in command
            elif re.search(r"\bpip3?\b.* (wheel|download)\b", command):
                locked = "--build-constraint constraints.txt" in command and "--no-deps" in command
            elif re.search(r"-m build\b", command):
                locked = "--no-isolation" in command
            else:
                other = re.search(
                    r"\b(uvx|pipx|conda|poetry|pyproject-build|easy_install)\b|--upgrade-deps", command
                )
                uv = re.search(r"(?<!\w)uv (?!--quiet pip compile )", command)
                locked = not (other or uv)
            if not locked:
                found.append(command.strip())
    return found


def test_every_pip_of_the_makefile_has_the_lock() -> None:
    commands = commands_of(ROOT / "Makefile")
    assert sum("--constraint constraints.txt" in command for command in commands) > 12
    assert any("-m build " in command for command in commands)
    assert unlocked(commands) == []


def test_the_workflows_and_ci_install_by_make_alone() -> None:
    for path in (ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")):
        assert not re.search(r"\bpip3? .*install|\buv ", path.read_text()), path.name


def test_pip_in_python_has_the_lock() -> None:
    """Each call of pip in benchmarks/ has the lock, or versions that `newest.py` has resolved."""
    meant = {"locked": '["--constraint", ', "resolved": '["--requirement", '}
    found = 0
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.List) or "'install'" not in map(ast.unparse, node.elts):
                continue
            text = ast.unparse(node)
            named = [name for name in meant if f"*{name}" in text]
            assert named or "torch==" in text, f"{path.name}:{node.lineno} installs without the lock: {text}"
            assert all(f"{name} = {meant[name]}" in source for name in named), path.name
            found += 1
    assert found >= 4


@pytest.mark.parametrize("python", PYTHONS)
def test_everything_is_locked(python: str) -> None:
    """Each requirement has a locked version for each Python, and the requirement allows it."""
    versions = lock.locked(python)
    asked = [need for name in ("test", "programs", "dev") for need in lock.extra(name, python)]
    asked += [need for name in lock.groups() for need in lock.group(name, python)]
    assert len(asked) > 35
    for need in asked:
        name = canonicalize_name(need.name)
        assert name in versions, (
            f"constraints.txt has no version of {need.name}, which pyproject.toml requires; run make lock"
        )
        assert versions[name] in need.specifier, (
            f"constraints.txt locks {name} {versions[name]}, pyproject.toml requires {need}; run make lock"
        )


def test_torch_is_switched_elsewhere() -> None:
    assert not {"torch", "triton", "cuda-toolkit"} & set(lock.locked("3.11"))


def test_this_environment_is_the_locked_one() -> None:
    """Installed packages have the locked versions. Others may make other tests fail."""
    if os.environ.get("DYNSWAP_UNLOCKED"):
        pytest.skip("DYNSWAP_UNLOCKED is set: this environment is meant to have other versions (make newest)")
    locked = lock.locked(platform.python_version())
    own = importlib.metadata.distributions(path=[sysconfig.get_path(name) for name in ("purelib", "platlib")])
    installed = {canonicalize_name(each.name): each.version for each in own}
    assert {"pytest", "pip"} <= installed.keys()
    wrong = [
        f"{name} is {version}, locked is {locked[name]}"
        for name, version in installed.items()
        if name in locked and version != locked[name]
    ]
    assert not wrong, (
        f"this environment is not that of constraints.txt: {'; '.join(wrong)}; run make -B .venv/.installed"
    )
