"""`make newest` tells two libraries that refuse each other's version from tests that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import benchmark_scripts  # noqa: F401  (the folder that the next ones are in)

import newest  # isort: skip
import newest_verdicts  # isort: skip
import newest_versions  # isort: skip

#: As transformers 5.24 has it (transformers/utils/peft_utils.py).
OLD_PEFT = "The version of PEFT you are using is not compatible, please use a version >= 0.22.0"

LIBRARY = f"""
def check():
    raise ValueError("{OLD_PEFT}")
"""
TESTS = f"""
import library

def test_passes(): pass
def test_refused(): library.check()
def test_failed(): assert "{OLD_PEFT}" == ""
def test_our_complaint(): raise ValueError("{OLD_PEFT}")
"""


def test_a_refusal_of_a_version_is_told_from_a_failure(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "library.py").write_text(LIBRARY)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    done = subprocess.run(
        [*command, *newest_verdicts.ARGUMENTS],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "report.xml").exists(), done.stdout + done.stderr
    found = newest_verdicts.read(tmp_path / "report.xml", {"peft"})
    assert found.passed == 1 and len(found.failures) == 2
    ((by, _), names), *others = found.refusals.items()
    assert by == "library" and [name.rpartition("::")[2] for name in names] == ["test_refused"]
    assert others == []


class Resolved(newest_versions.Resolver):
    """Knows a release of two libraries, one of which goes with nothing."""

    def newest(self, libraries: Iterable[str]) -> dict[str, str]:
        return self.locked | {"peft": "99.0", "gguf": "99.0"}

    def lifted(self, library: str, version: str, libraries: Iterable[str]) -> dict[str, str]:
        if library == "gguf":
            raise newest_versions.Refused("gguf==99.0 depends on numpy<2 and you require numpy>=2")
        return self.locked | {library: version, "tokenizers": "98.0"}

    def all_newest(self, libraries: Iterable[str]) -> dict[str, str]:
        return self.lifted("peft", "99.0", libraries)


class AllPass:
    """An environment in which every test passes."""

    installed: ClassVar[list[str]] = []

    def prepare(self) -> None: ...

    def install(self, found: Path, versions: dict[str, str]) -> None:
        self.installed.append(found.name)

    def test(self, paths: list[str], packages: set[str]) -> newest_verdicts.Verdicts:
        return newest_verdicts.Verdicts(passed=3)


def test_a_row_runs_if_it_has_versions_of_its_own(tmp_path: Path) -> None:
    environment = AllPass()
    libraries = ["numpy", "gguf", "peft"]
    run = newest.Newest(Resolved("3.11", "2.13.0", tmp_path), environment, libraries, [])  # type: ignore[arg-type]
    for library in [*libraries, newest.ALL]:
        run.run(library)
    numpy, gguf, peft, everything = run.rows
    assert numpy.note == "as locked" and numpy.newest == numpy.locked
    assert gguf.note == "unresolvable" and "numpy<2" in gguf.unresolvable
    assert peft.verdicts and peft.moved == {"tokenizers": f"{run.resolver.locked['tokenizers']} -> 98.0"}
    assert everything.note == "the same versions as peft; not the newest: gguf " + run.resolver.locked["gguf"]
    assert environment.installed == ["peft.txt"]
    shown = newest.table(run.rows) + "\n".join(newest.report(run.rows))
    assert all(word in shown for word in ("as locked", "unresolvable", "numpy<2", "tokenizers"))
    assert [row.to_mend for row in run.rows] == [0, 0, 0, 0]
