"""Finds the newest releases of libraries, and what has to move with them.

uv resolves; nothing is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lock

#: Torch and what it requires, which are the same in every row. uv resolves them for PyPI's build for CUDA.
OF_TORCH = re.compile(r"torch|triton|(cuda|nvidia)-[a-z0-9-]*")


class Refused(Exception):
    """No set of versions satisfies the requirements; the message is the resolver's reason, shortened."""


class NotResolved(Exception):
    """The resolver found no answer, for example without a network."""


class Resolver:
    """Resolves versions for this interpreter. Keeps requirements and results in a folder."""

    def __init__(self, python: str, torch: str, folder: Path) -> None:
        self.python = python
        self.torch = torch
        self.folder = folder
        self.locked = lock.locked(python)
        folder.mkdir(parents=True, exist_ok=True)

    def asked(self) -> list[Requirement]:
        """Return the requirements of the tests of programs."""
        return [need for name in ("test", "programs") for need in lock.extra(name, self.python)]

    def newest(self, libraries: Iterable[str]) -> dict[str, str]:
        """Return the newest release of each library for this Python, whatever the others require."""
        return self._compile("releases", list(libraries), {}, "--no-deps")

    def lifted(self, library: str, version: str, libraries: Iterable[str]) -> dict[str, str]:
        """Return the locked versions with another version of one library, and what has to move with it."""
        pinned = [*self._requirements(libraries), f"{library}=={version}"]
        return self._compile(library, pinned, self.locked)

    def all_newest(self, libraries: Iterable[str]) -> dict[str, str]:
        """Return the versions that an install of everything gets today."""
        return self._compile("all", self._requirements(libraries), {})

    def _requirements(self, libraries: Iterable[str]) -> list[str]:
        """Return the requirements, the given torch, and what is held back except for `libraries`."""
        lifted = set(libraries)
        held = [need for need in lock.held_back() if canonicalize_name(need.name) not in lifted]
        return [*map(str, self.asked()), *map(str, held), f"torch=={public(self.torch)}"]

    def _compile(self, name: str, wanted: list[str], preferred: dict[str, str], *more: str) -> dict[str, str]:
        """Resolve, and return the versions.

        Preferred versions are kept where possible, as uv does with its output file.
        """
        given, found = self.folder / f"{name}.in", self.folder / f"{name}.txt"
        given.write_text("".join(f"{line}\n" for line in wanted))
        found.write_text(pinned(preferred))
        # Without [tool.uv] of pyproject.toml, which holds back versions that are to be lifted here.
        command = [uv(), "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"]
        command += ["--no-build-isolation", "--python", sys.executable, "--no-python-downloads"]
        command += ["--output-file", str(found), *more, str(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            if "No solution found" in done.stderr:
                raise Refused(shortened(done.stderr, name))
            raise NotResolved(f"uv: {(done.stderr.strip().splitlines() or ['no message'])[0][:300]}")
        needs = [Requirement(line) for line in found.read_text().splitlines() if line]
        needs = [need for need in needs if not OF_TORCH.fullmatch(need.name)]
        versions = {str(canonicalize_name(need.name)): next(iter(need.specifier)).version for need in needs}
        found.write_text(pinned(versions))
        return versions


def pinned(versions: dict[str, str]) -> str:
    """Return versions in the format that pip and uv read."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def public(version: str) -> str:
    """Return "2.13.0" for "2.13.0+cpu".

    PyPI does not have the build's name, and pip is set up for one build.
    """
    return version.partition("+")[0]


def uv() -> str:
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if not found:
        raise NotResolved("there is no uv here: `pip install --constraint constraints.txt --group lock`")
    return found


def shortened(message: str, library: str) -> str:
    """Return the requirements of two libraries that contradict each other, from a resolver's proof.

    uv's proof is a chain: "Because A==2 depends on B<2 and you require A==2, we can conclude that you
    require B<2. And because you require B==3, we can conclude that your requirements are unsatisfiable." It
    is shortened to "A==2 depends on B<2 and you require B==3".
    """
    _, _, proof = message.partition("No solution found when resolving dependencies")
    proof = re.sub(r"^\s*(?:hint:.*|cause:)", "", proof.lstrip(": "), flags=re.MULTILINE)
    premises = re.findall(r"[Bb]ecause (.*?),? we can conclude that", " ".join(proof.split()))
    clauses = [
        clause for premise in premises if _names(premise, library) for clause in premise.split(" and ")
    ]
    kept = [clause for clause in clauses if " depends on " in clause]
    if not kept:
        return premises[0] if premises else " ".join((proof or message).split())
    for clause in (clause for premise in premises for clause in premise.split(" and ")):
        needed = re.match(r"you require ([\w.-]+)", clause)
        if needed and any(_names(one.partition(" depends on ")[2], needed[1]) for one in kept):
            kept.append(clause)
    return " and ".join(dict.fromkeys(kept))


def _names(text: str, library: str) -> bool:
    names = re.findall(r"[A-Za-z][\w.-]*", text)
    return canonicalize_name(library) in map(canonicalize_name, names)
