"""Reads constraints.txt, which `make lock` writes, and the requirements in pyproject.toml that it locks.

A Python is named by a release, "3.11.7", or by a minor version, "3.11", which stands for a late release of
it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


def locked(python: str) -> dict[str, str]:
    """Return the locked version of each package: {"transformers": "5.23.0", ...}."""
    versions = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if not (text := line.partition("#")[0].strip()):
            continue
        requirement = Requirement(text)
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"constraints.txt names no exact version: {text}"
        if _applies(requirement, python):
            name = canonicalize_name(requirement.name)
            assert name not in versions, f"constraints.txt has two versions of {name} for Python {python}"
            versions[name] = specifier.version
    return versions


def extra(name: str, python: str) -> list[Requirement]:
    """Return the requirements of an extra of the package, including those of extras that it names."""
    return _requirements(_project()["project"]["optional-dependencies"], name, python)


def group(name: str, python: str) -> list[Requirement]:
    """Return the requirements of a dependency group."""
    return _requirements(_project()["dependency-groups"], name, python)


def groups() -> list[str]:
    """Return the names of the dependency groups."""
    return list(_project()["dependency-groups"])


def held_back() -> list[Requirement]:
    """Return the requirements that keep `make lock` at an older version of a package."""
    return list(map(Requirement, _project()["tool"]["uv"]["constraint-dependencies"]))


def default_torch() -> str:
    """Return the version of torch that the Makefile installs unless TORCH names another."""
    found = re.search(r"^TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, "the Makefile names no default torch"
    return found[1]


def _requirements(tables: dict[str, list[str]], name: str, python: str) -> list[Requirement]:
    found = []
    for requirement in map(Requirement, tables[name]):
        if canonicalize_name(requirement.name) == "dynswap-ext":
            for inner in sorted(requirement.extras):
                found += _requirements(tables, inner, python)
        elif _applies(requirement, python):
            found.append(requirement)
    return found


def _applies(requirement: Requirement, python: str) -> bool:
    minor = ".".join(python.split(".")[:2])
    release = f"{python}.99" if python == minor else python
    environment = {"python_version": minor, "python_full_version": release}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
