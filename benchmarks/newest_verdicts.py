"""Reads a report of pytest: which tests passed or failed, and where libraries refuse each other's version.

A failed test is a refusal if a library raised the exception, and the exception complains about a version.
Anything else is a failure. A complaint by torch, by this package or by a test is a failure too, as it has to
be fixed here.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

#: The arguments of pytest for a report that can be read here. If a file cannot be imported, that is one
#: refusal or failure, and the other files still run.
ARGUMENTS = ("--tb=short", "--color=no", "--continue-on-collection-errors", "-o", "junit_logging=no")

#: Packages in site-packages that do not count as libraries.
_OURS = {"torch", "dynswap_ext", "pytest", "_pytest", "pluggy"}

_NAME = r"[`'\"]?(?<![\w.-])(?P<name>[A-Za-z](?:[\w.-]*\w)?)[`'\"]?"
_NUMBER = r"v?\d+\.\d+"
_DEMAND = (
    r"\b(?:please|(?:up|down)grade|update|install|installed|found|requires?|required|needs?|needed"
    r"|(?:in)?compatible|(?:un)?supported)\b"
)
_DEMAND_AND_NUMBER = rf"(?=.*{_DEMAND}).*{_NUMBER}"
#: Patterns of complaints about a version, with the name of the package that it is about.
_COMPLAINTS = [
    # "peft>=0.22 is required for a normal functioning of this module, but found peft==0.21.2"
    (_DEMAND, rf"{_NAME}(?:\[[\w, -]+\])? ?\(?(?:==|~=|!=|>=|<=|>|<) ?v?\d"),
    # "The version of PEFT you are using is not compatible, please use a version that is greater than 0.22.0"
    (_DEMAND_AND_NUMBER, rf"\bversions? of {_NAME}"),
    (_DEMAND_AND_NUMBER, rf"{_NAME}(?:'s)? version\b"),
    # "requires accelerate 1.2.0 or newer"
    ("", rf"\b(?:requires?|needs?|upgrade|update|install) (?:to )?(?:at least )?{_NAME} {_NUMBER}"),
    # "please install a newer version of accelerate"
    ("", rf"\b(?:newer|older|later|recent|higher|lower|latest|earlier) (?:version|release)s? of {_NAME}"),
]

_FRAME = re.compile(r"^(?P<file>\S[^:\n]*):\d+: in ")
_CHILDS_FRAME = re.compile(r'^(?P<indent> *)File "(?P<file>[^"]+)", line \d+')
_LINK = re.compile(
    r"^ *(?:The above exception was the (?P<cause>direct cause) of|During handling of the above exception)"
)


@dataclass(frozen=True)
class Raised:
    """One exception of a chain: the file of its last frame, and its text."""

    file: str
    text: str
    #: Whether it was raised from the one before it, and says the same in other words.
    caused: bool = False


@dataclass
class Verdicts:
    """The results of the tests of one run."""

    passed: int = 0
    skipped: int = 0
    #: Failed tests and their first lines: {"tests.programs.test_peft::test_merge": "AssertionError: ..."}.
    failures: dict[str, str] = field(default_factory=dict)
    #: The tests that fail because a library refuses a version, by that library and its message.
    refusals: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    #: The reasons for skipped tests that are about a version, or about a library that is installed.
    skips: dict[str, int] = field(default_factory=dict)

    @property
    def refused(self) -> int:
        return sum(map(len, self.refusals.values()))


def read(report: Path, packages: Collection[str]) -> Verdicts:
    """Read a report that pytest wrote with `ARGUMENTS`; a complaint is about one of the `packages`."""
    found = Verdicts()
    failed: set[str] = set()
    for case in ET.parse(report).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        wrong = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if wrong is not None:
            if name in failed:  # the end of a failed test may fail, too
                continue
            failed.add(name)
            text = wrong.text or ""
            if refusal := refused_by(text, packages):
                found.refusals.setdefault(refusal, []).append(name)
            else:
                found.failures[name] = first_line(text, wrong.get("message") or "no message")
        elif skipped is not None:
            found.skipped += 1
            reason = skipped.get("message") or ""
            if re.search(
                r"\bversion|\bnewer\b|\bolder\b|\bis not installed\b|\bcould not import\b|[<>=]=\s*\d", reason
            ):
                found.skips[reason] = found.skips.get(reason, 0) + 1
        else:
            found.passed += 1
    return found


def refused_by(text: str, packages: Collection[str]) -> tuple[str, str] | None:
    """Return the library that refuses a version and its message, if that is why a test failed."""
    chain = exceptions(text)
    # A script that a test runs prints its traceback, which becomes the message of the test's own assertion.
    if chain and (childs := exceptions_of_child(chain[-1].text)):
        chain = childs
    for raised in reversed(chain):
        library = library_of(raised.file)
        if library is None:
            return None
        message = raised.text.partition(": ")[2].partition("\n\n")[0].partition("\nTry: ")[0]
        message = " ".join(message.split())
        if complaint(message, packages):
            return library, message[:400]
        if not raised.caused:
            return None
    return None


def complaint(message: str, packages: Collection[str]) -> str | None:
    """Return the package of which a message wants another version, or None.

    A number alone is no version: "dropout<1.0 is required" names no package.
    """
    for words, pattern in _COMPLAINTS:
        if re.search(words, message, re.IGNORECASE):
            for found in re.finditer(pattern, message, re.IGNORECASE):
                if (name := canonicalize_name(found["name"])) in packages:
                    return name
    return None


def library_of(file: str) -> str | None:
    """Return the import name of the third-party library that a file belongs to, or None."""
    _, folder, rest = file.replace("\\", "/").rpartition("/site-packages/")
    library = rest.partition("/")[0].removesuffix(".py")
    return library if folder and library not in _OURS else None


def exceptions(text: str) -> list[Raised]:
    """Return the exceptions in pytest's short form, in the order in which they were raised."""
    chain: list[Raised] = []
    file, message, caused = "", "", False
    for line in text.splitlines():
        frame, link = _FRAME.match(line), _LINK.match(line)
        if message and (frame or link):
            chain.append(Raised(file, message, caused))
            message, caused = "", False
        if frame:
            file = frame["file"]
        elif link:
            caused = bool(link["cause"])
        elif line.startswith("E   "):
            message += line[4:] + "\n"
    return [*chain, Raised(file, message, caused)] if message else chain


def exceptions_of_child(text: str) -> list[Raised]:
    """Return the exceptions of the tracebacks that Python printed; the beginning may be cut off."""
    chain: list[Raised] = []
    file, indent, caused = "", 0, False
    for line in text.splitlines():
        frame, link = _CHILDS_FRAME.match(line), _LINK.match(line)
        if frame:
            file, indent = frame["file"], len(frame["indent"])
        elif link:
            caused = bool(link["cause"])
        elif file and line.strip() and len(line) - len(line.lstrip()) <= indent - 2:
            chain.append(Raised(file, line.strip(), caused))
            file, caused = "", False
    return chain


def first_line(text: str, otherwise: str) -> str:
    chain = exceptions(text)
    if chain and (childs := exceptions_of_child(chain[-1].text)):
        chain = childs
    return (chain[-1].text if chain else otherwise).strip().partition("\n")[0][:200]
