"""Runs targets of the Makefile one after the other, and prints a summary of what ran, passed and failed.

    python tests/steps.py 'make test' QUICK=1 build test-native test-cuda cpp-test

The first argument is the title of the summary. An argument with a `=` is a variable of make for the targets
after it. If a target fails, the next ones run all the same. A step may run this script again, as `test-all`
of the continuous integration does; the inner run then reports to the outer. Uses the standard library alone.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: The environment variable that tells steps in which folder they and pytest write their reports.
REPORTS = "DYNSWAP_TEST_REPORTS"
#: Lines of other tools that belong in the summary: how they ended, and what failed in C++ and in the ratios.
CLOSING = re.compile(
    r"^All checks passed|^Success: no issues|Documentation built|'cuda': True|tests passed, |tests failed out"
    r"|comparisons, [0-9]+ failures|^left out|not as expected|, at most [0-9]"
    r"|^(?:[0-9]+: )?(?:FAIL |SUMMARY: [A-Z]\w+Sanitizer|\S+\.(?:cpp|h|cu):[0-9]+: |.*: runtime error: )"
)
#: How many reasons for skipped tests the summary names.
REASONS = 4


@dataclass
class Step:
    """One target of the Makefile: how it ended, and which of its lines belong in the summary."""

    target: str
    good: bool
    seconds: float
    #: The lines that `CLOSING` finds.
    said: list[str] = field(default_factory=list)


@dataclass
class Tests:
    """How many tests of pytest passed, were skipped and why, and the names of those that failed."""

    passed: int = 0
    #: The names in order, each once: if a test and its teardown fail, pytest reports both.
    failed: dict[str, None] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, report: Path) -> None:
        """Count the tests of one report that pytest has written in JUnit's format."""
        try:
            cases = list(ET.parse(report).getroot().iter("testcase"))
        except ET.ParseError as error:
            self.failed[f"the report of a pytest that was ended cannot be read ({error})"] = None
            return
        for case in cases:
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed["::".join(filter(None, (case.get("classname"), case.get("name"))))] = None
            elif skip is not None:
                self.skipped[skip.get("message") or "no reason"] += 1
            else:
                self.passed += 1

    def __str__(self) -> str:
        """Return how many passed, failed and were skipped, with the most frequent reasons."""
        total = self.skipped.total()
        told = [f"{count}: {reason}" for reason, count in self.skipped.most_common(REASONS)]
        if rest := total - sum(count for _, count in self.skipped.most_common(REASONS)):
            told.append(f"{rest}: other reasons")
        why = f" ({'; '.join(told)})" if told else ""
        return f"{self.passed:,} passed, {len(self.failed):,} failed, {total:,} skipped{why}"


def main(title: str, *arguments: str) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a summary is for any terminal
    inner = Path(os.environ.get(REPORTS, os.devnull)).is_dir()
    with tempfile.TemporaryDirectory() as temporary:
        if not inner:
            os.environ[REPORTS] = temporary
        folder = Path(os.environ[REPORTS])
        begun = time.monotonic()
        try:
            status = 0 if run_all(arguments, folder) else 1
        except KeyboardInterrupt:
            status = 130  # as shells have it
        if not inner:
            tests, text = summary(title, folder, time.monotonic() - begun)
            print(text, flush=True)
            status = status or int(bool(tests.failed))
    return status


def run_all(arguments: tuple[str, ...], folder: Path) -> bool:
    """Run the targets; return whether all of them ended well."""
    settings: list[str] = []
    count, number = sum("=" not in argument for argument in arguments), 0
    good = True
    for argument in arguments:
        if "=" in argument:
            settings.append(argument)
            continue
        number += 1
        print(f"== {number} of {count}: make {argument}", flush=True)
        step = Step(argument, good=False, seconds=0.0)
        begun = time.monotonic()
        try:
            step.good = run(argument, settings, step.said)
        finally:
            step.seconds = time.monotonic() - begun
            with (folder / "steps.jsonl").open("a") as file:
                print(json.dumps(asdict(step)), file=file)
        good = good and step.good
    return good


def run(target: str, settings: list[str], said: list[str]) -> bool:
    """Run one target, show what it prints, and add what the summary needs; return whether it ended well."""
    command = [os.environ.get("MAKE", "make"), "--no-print-directory", target, *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        line = b""
        while got := process.stdout.read1():  # dots of progress come without an end of the line
            sys.stdout.buffer.write(got)
            sys.stdout.buffer.flush()
            *whole, line = (line + got).split(b"\n")
            said += [text for each in whole if CLOSING.search(text := each.decode(errors="replace").strip())]
    return process.returncode == 0


def write_report(config: Any) -> None:
    """Make pytest write a report for this script if pytest is one of its steps.

    This has to run before pytest's own plugin for reports is configured (`tryfirst`). A pytest that a test
    starts writes none.
    """
    if (reports := os.environ.pop(REPORTS, "")) and not hasattr(config, "workerinput"):
        config.option.xmlpath = str(Path(reports) / f"{time.time_ns()}-{os.getpid()}.xml")


def summary(title: str, folder: Path, seconds: float) -> tuple[Tests, str]:
    """Return how the tests ended, and a text: failed tests, a line for each step, and one for the whole."""
    listed = folder / "steps.jsonl"
    steps = [Step(**json.loads(line)) for line in listed.read_text().splitlines()] if listed.exists() else []
    tests = Tests()
    for report in sorted(folder.glob("*.xml")):
        tests.add(report)
    lines = [f"FAILED {name}" for name in tests.failed]
    for step in steps:
        end = "ok" if step.good else "FAILED"
        lines.append(
            f"== {step.target}: {end} in {step.seconds:.0f} s{''.join(f'; {line}' for line in step.said)}"
        )
    minutes, rest = divmod(round(seconds), 60)
    wrong = [step.target for step in steps if not step.good]
    end = f"FAILED ({', '.join(wrong) or 'tests'})" if wrong or tests.failed or not steps else "ok"
    lines.append(f"== {title}: {end} in {minutes} min {rest} s; {tests}")
    return tests, "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
