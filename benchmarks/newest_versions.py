"""Find the newest releases of libraries, and what has to move for them: uv resolves, and installs nothing."""

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

#: Torch is the same in every row, with what comes along: uv names that of a build for CUDA, as PyPI has it.
OF_TORCH = re.compile(r"torch|triton|(cuda|nvidia)-[a-z0-9-]*")


class Refused(Exception):
    """No set of versions holds what was asked for; the message is the resolver's reason, shortened."""


class NotResolved(Exception):
    """The resolver did not get as far as an answer: no network, say."""


class Resolver:
    """Resolves for this interpreter, in a folder where what it was asked and what it found stay."""

    def __init__(self, python: str, torch: str, folder: Path) -> None:
        self.python = python
        self.torch = torch
        self.folder = folder
        self.locked = lock.locked(python)
        folder.mkdir(parents=True, exist_ok=True)

    def asked(self) -> list[Requirement]:
        """Return what the tests of programs install."""
        return [need for name in ("test", "programs") for need in lock.extra(name, self.python)]

    def newest(self, libraries: Iterable[str]) -> dict[str, str]:
        """Return the newest release of each library for this Python, whatever the others want."""
        return self._compile("releases", list(libraries), {}, "--no-deps")

    def lifted(self, library: str, version: str, libraries: Iterable[str]) -> dict[str, str]:
        """Return the locked versions with this one of the library, and what has to move for it moved."""
        pinned = [*self._requirements(libraries), f"{library}=={version}"]
        return self._compile(library, pinned, self.locked)

    def all_newest(self, libraries: Iterable[str]) -> dict[str, str]:
        """Return what somebody gets who installs everything today."""
        return self._compile("all", self._requirements(libraries), {})

    def _requirements(self, libraries: Iterable[str]) -> list[str]:
        """What is asked for, the given torch, and what is held back of other packages than the libraries."""
        lifted = set(libraries)
        held = [need for need in lock.held_back() if canonicalize_name(need.name) not in lifted]
        return [*map(str, self.asked()), *map(str, held), f"torch=={public(self.torch)}"]

    def _compile(self, name: str, wanted: list[str], preferred: dict[str, str], *more: str) -> dict[str, str]:
        """Resolve; a version that is preferred, as one in uv's output file is, stays where it can."""
        given, found = self.folder / f"{name}.in", self.folder / f"{name}.txt"
        given.write_text("".join(f"{line}\n" for line in wanted))
        found.write_text(pinned(preferred))
        # Without [tool.uv] of pyproject.toml, which holds back what is to be lifted here.
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
    """Write versions as pip and uv read them."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def public(version: str) -> str:
    """Leave out of "2.13.0+cpu" which build it is: PyPI does not know, and pip is set up for one."""
    return version.partition("+")[0]


def uv() -> str:
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if not found:
        raise NotResolved("there is no uv here: `pip install --constraint constraints.txt --group lock`")
    return found


def shortened(message: str, library: str) -> str:
    """Return, of a resolver's proof, which requirements of two libraries do not go together.

    uv's proof is a chain: "Because A==2 depends on B<2 and you require A==2, we can conclude that you
    require B<2. And because you require B==3, we can conclude that your requirements are unsatisfiable." Of
    it remains "A==2 depends on B<2 and you require B==3".
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
