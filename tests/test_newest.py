"""`make newest` tells libraries that refuse each other's version from tests that fail."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import benchmark_scripts  # noqa: F401  (the folder that the next ones are in)

import newest  # isort: skip
import newest_verdicts  # isort: skip
import newest_versions  # isort: skip


class Resolved(newest_versions.Resolver):
    """A resolver that knows a release of two libraries, one of which fits no others."""

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
