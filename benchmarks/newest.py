"""Runs the tests of the programs with the newest release of each library.

One library at a time goes to its newest release. The others stay as in constraints.txt, except for those
that have to move with it. Then all go at once. The tests of the programs run with each, on the CPU and
through the native provider, so that a release that breaks them is known by name. Two libraries that refuse
each other's version are told apart from tests that fail. The exit status is 1 if a test failed or a row
could not be run, and 0 if libraries only refuse each other. A row takes minutes. The virtual environment,
with a torch of its own, is kept.

    python benchmarks/newest.py                                  # each library with a newer release, and all
    python benchmarks/newest.py --only transformers peft
    python benchmarks/newest.py --only all --tests tests/programs/test_peft.py

PYTEST_ADDOPTS="-n 4" is for a machine with more cores.
"""

from __future__ import annotations

import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

import common
import lock
from newest_environment import Environment, Failed
from newest_verdicts import Verdicts, complaint
from newest_versions import NotResolved, Refused, Resolver

TESTS = ("programs", "examples", "test_docs_guides.py", "contract/test_kept_in_float32.py")
#: Tests that show that a row is installed and tested.
QUICK = ("contract/test_kept_in_float32.py",)
#: Libraries besides those of the extra `programs`: they read and write checkpoints.
MORE = ("safetensors", "huggingface-hub", "gguf", "numpy")
ALL = "all"
PYTHON = platform.python_version()


@dataclass
class Row:
    """The result with the newest release of one library, or of all at once."""

    library: str
    locked: str = ""
    newest: str = ""
    #: The versions of all packages that are installed for the row.
    versions: dict[str, str] = field(default_factory=dict)
    #: Other packages whose version differs from the lock: {"tokenizers": "0.23.3 -> 0.24.0"}.
    moved: dict[str, str] = field(default_factory=dict)
    verdicts: Verdicts | None = None
    seconds: float = 0.0
    #: Why nothing ran, or which versions are not the newest.
    note: str = ""
    #: Which requirements the resolver could not bring together.
    unresolvable: str = ""
    #: The step that failed.
    broken: str = ""

    @property
    def name(self) -> str:
        return f"{self.library} {self.newest}".rstrip()

    @property
    def to_mend(self) -> int:
        """Return how many tests failed. A row that should have run and did not counts as one."""
        return len(self.verdicts.failures) if self.verdicts else int(bool(self.broken))

    def figures(self) -> dict[str, Any]:
        figures = {key: value for key, value in asdict(self).items() if key != "verdicts"}
        if self.verdicts:
            refusals = {f"{by}: {message}": tests for (by, message), tests in self.verdicts.refusals.items()}
            figures |= vars(self.verdicts) | {"refusals": refusals}
        return figures


class Newest:
    """Runs one row after the other."""

    def __init__(
        self, resolver: Resolver, environment: Environment, libraries: list[str], tests: list[str]
    ) -> None:
        self.resolver = resolver
        self.environment = environment
        self.libraries = libraries
        self.tests = tests
        self.releases = resolver.newest(libraries)
        self.rows: list[Row] = []

    def run(self, library: str) -> None:
        row = Row(library, self.resolver.locked.get(library, ""), self.releases.get(library, ""))
        self.rows.append(row)
        print(f"== {row.name}", flush=True)
        try:
            self._resolve(row)
            if not row.versions:
                row.note = "as locked"
            elif same := next(
                (ran for ran in self.rows if ran.verdicts and ran.versions == row.versions), None
            ):
                row.note = "; ".join(filter(None, (f"the same versions as {same.library}", row.note)))
            else:
                self.environment.prepare()
                self.environment.install(self.resolver.folder / f"{library}.txt", row.versions)
                begun = time.monotonic()
                row.verdicts = self.environment.test(self.tests, packages())
                row.seconds = round(time.monotonic() - begun, 1)
        except Refused as reason:
            row.note, row.unresolvable = "unresolvable", str(reason)
        except (Failed, NotResolved) as error:
            row.note, row.broken = "BROKEN", str(error)
        if row.note:
            print(f"   {row.note}", flush=True)

    def _resolve(self, row: Row) -> None:
        """Find the row's versions, unless they are those of the lock."""
        if row.library == ALL:
            versions = self.resolver.all_newest(self.libraries)
            older = [
                f"{name} {versions[name]}" for name in self.libraries if versions[name] != self.releases[name]
            ]
            row.note = f"not the newest: {', '.join(older)}" if older else ""
        elif row.newest == row.locked:
            return
        else:
            versions = self.resolver.lifted(row.library, row.newest, self.libraries)
        locked = self.resolver.locked
        changed = {name: version for name, version in versions.items() if version != locked.get(name)}
        row.versions = versions if changed else {}
        row.moved = {
            name: f"{locked.get(name, 'new')} -> {version}"
            for name, version in changed.items()
            if name != row.library
        }


def main() -> int:
    libraries = lifted()
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="LIBRARY", help=f"of {', '.join([*libraries, ALL])}")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help=f"default: {' '.join(TESTS)}, in tests/")
    parser.add_argument(
        "--work", type=Path, default=lock.ROOT / "build" / "newest", help="default: build/newest"
    )
    options = parser.parse_args()
    wanted = [canonicalize_name(name) for name in options.only or [*libraries, ALL]]
    if unknown := [name for name in wanted if name not in (*libraries, ALL)]:
        parser.error(f"--only: {unknown[0]} is none of {', '.join([*libraries, ALL])}")
    tests = options.tests or [f"tests/{name}" for name in (QUICK if options.tiny else TESTS)]

    # A run of some libraries, or a quick one, does not replace the kept record.
    record = common.Record("newest", tiny=options.tiny or bool(options.only or options.tests))
    environment = Environment(options.work.resolve())
    resolver = Resolver(PYTHON, environment.torch, environment.folder)
    try:
        newest = Newest(resolver, environment, libraries, tests)
    except NotResolved as error:
        parser.exit(1, f"{error}\n")
    for library in wanted:
        newest.run(library)
        record.figures = {"tests": tests, "rows": {row.library: row.figures() for row in newest.rows}}
        record.write(options.output)
    print(table(newest.rows), *report(newest.rows), sep="\n")
    record.bar(
        "tests that failed, and rows that did not run", sum(row.to_mend for row in newest.rows), at_most=0
    )
    record.finish(options.output)
    return int(any(row.to_mend for row in newest.rows))


def lifted() -> list[str]:
    names = [canonicalize_name(need.name) for need in lock.extra("programs", PYTHON)]
    return list(dict.fromkeys([*names, *MORE]))


def packages() -> set[str]:
    """Return the names of packages whose version a library may complain about."""
    return {*lock.locked(PYTHON), "torch", "pytorch", "triton"}


def table(rows: list[Row]) -> str:
    """Return a table with a line for each row."""
    lines = [
        [
            "library",
            "locked",
            "newest",
            "moved along",
            "passed",
            "failed",
            "refused",
            "skipped",
            "seconds",
            "",
        ]
    ]
    for row in rows:
        names = list(row.moved)
        moved = ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
        counts = [""] * 5
        if found := row.verdicts:
            numbers = (found.passed, len(found.failures), found.refused, found.skipped, round(row.seconds))
            counts = list(map(str, numbers))
        lines.append([row.library, row.locked, row.newest, moved, *counts, row.note])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.ljust] * 4 + [str.rjust] * 5 + [str.ljust]
    return "\n".join(
        "  ".join(put(cell, width) for put, cell, width in zip(aligned, line, widths, strict=True)).rstrip()
        for line in lines
    )


def report(rows: list[Row]) -> Iterator[str]:
    """Yield what the table only counts: each refusal and each failure once, with its rows."""
    for row in rows:
        if row.unresolvable:
            yield f"\n{row.name} was not installed: {row.unresolvable}."
        if row.broken:
            yield f"\n{row.name} BROKEN: {row.broken}"
        if len(row.moved) > 3:
            yield f"\n{row.name} moved {', '.join(f'{name} {change}' for name, change in row.moved.items())}."
    refusals: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    failures: dict[tuple[str, str], list[str]] = defaultdict(list)
    skips: dict[str, dict[str, int]] = defaultdict(dict)
    versions: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if row.verdicts is None:
            continue
        for refusal, refused in row.verdicts.refusals.items():
            refusals[refusal][row.name] = len(refused)
            versions.setdefault(refusal, row.versions)
        for failure in row.verdicts.failures.items():
            failures[failure].append(row.name)
        for reason, number in row.verdicts.skips.items():
            skips[reason][row.name] = number
    for (by, message), where in refusals.items():
        yield f"\n{refusing(by, message, versions[by, message])} ({counted(where)}): {message}"
    for group in dict.fromkeys(map(tuple, failures.values())):
        tests = [failure for failure, names in failures.items() if tuple(names) == group]
        yield f"\nfailed with {' and with '.join(group)}: {len(tests)}"
        yield from (f"  {test}\n    {line}" for test, line in tests)
    for reason, where in skips.items():
        yield f"\nskipped ({counted(where)}): {reason}"


def counted(where: dict[str, int]) -> str:
    return ", ".join(f"{number} test{'s'[: number != 1]} with {name}" for name, number in where.items())


def refusing(by: str, message: str, versions: dict[str, str]) -> str:
    """Return a text that names the library that refuses, and the one that it refuses."""
    by = canonicalize_name(by)
    other = complaint(message, packages() - {by})
    named = [f"{name} {versions.get(name, '')}".rstrip() for name in (by, other) if name]
    return " refuses ".join(named) if other else f"{named[0]} refuses a version"


if __name__ == "__main__":
    sys.exit(main())
