"""Builds the extension and runs the contract's tests with each supported pair of Python and torch.

Each pair starts from a clean virtual environment: torch from the package index, this checkout built and
installed as a wheel, and the tests of the contract. It needs an interpreter of each Python (on PATH, or
pyenv's), a compiler, and 6 GB of disk for one pair at a time, as torch brings CUDA's libraries.

    python benchmarks/matrix.py                              # all pairs: half an hour and more on two cores
    python benchmarks/matrix.py --only 3.13 --tests tests/test_install.py
    python benchmarks/matrix.py --only 3.13 --output benchmarks/results/matrix.json    # that pair again
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parent.parent

#: Pairs of Python and torch, which cover the ends of both ranges and versions between them.
PAIRS = (("3.10", "2.11"), ("3.11", "2.13"), ("3.12", "2.14"), ("3.13", "2.15"))
TESTS = ("contract", "test_class_swap.py", "test_install.py", "test_provider.py", "test_provider_devices.py")
#: Tests that compile for minutes, and test torch more than this package. The usual run has them.
LEFT_OUT = ("contract/test_compile.py",)
#: Tests that show that an interpreter works at all.
QUICK = ("contract/test_attributes.py", "contract/test_training.py", "test_class_swap.py", "test_install.py")
#: Makes pip ignore its local configuration and constraints, so that a pair gets the torch that it names.
WITHOUT_PIP_CONFIG = {"PIP_CONFIG_FILE": os.devnull, "PIP_CONSTRAINT": ""}


class Failed(Exception):
    """A command failed; with its first error."""


class NotRun(Exception):
    """A pair cannot run, because there is no interpreter, or no torch for it."""


@dataclass
class Outcome:
    """The result of a pair."""

    python: str
    torch: str
    provider: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    install_seconds: float = 0.0
    build_seconds: float = 0.0
    test_seconds: float = 0.0
    #: Whether this torch could be installed only with pip's local configuration ignored.
    pip_config_ignored: bool = False
    #: The commit of this checkout when the pair ran.
    commit: str = ""
    #: The tests that failed, or the step that failed before them.
    failures: tuple[str, ...] = ()
    not_run: str = ""

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failures


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", metavar="PYTHON", help="the pair of one Python: 3.13")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help=f"default: {' '.join(TESTS)}, in tests/")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix", help="default: build/matrix")
    parser.add_argument("--cuda", default="auto", help="DYNSWAP_CUDA of the builds: 0, 1 or auto (default)")
    options = parser.parse_args()
    pairs = [pair for pair in PAIRS if options.only in (None, pair[0])]
    if not pairs:
        parser.error(f"--only: no pair has Python {options.only}")
    tests = options.tests or [f"tests/{name}" for name in (QUICK if options.tiny else TESTS)]

    # A run of some pairs, or a quick one, does not replace the kept record.
    record = common.Record("matrix", tiny=options.tiny or options.only is not None)
    outcomes = others(options)
    for python, torch in pairs:
        outcomes.append(run_pair(python, torch, tests, options))
        outcomes.sort(key=lambda outcome: tuple(map(int, outcome.python.split("."))))
        record.figures = {"tests": tests, "pairs": {each.python: asdict(each) for each in outcomes}}
        record.write(options.output)
    print(table(outcomes))
    for outcome in outcomes:
        name = f"Python {outcome.python}, torch {outcome.torch}"
        record.bar(f"{name}: tests that pass", outcome.passed, at_least=1)
        record.bar(f"{name}: tests that fail", len(outcome.failures), at_most=0)
    status = record.finish(options.output)
    # If only some pairs were asked for and could not run, that is no failure; the table says so.
    return status if all(outcome.good or outcome.not_run for outcome in outcomes) else 1


def others(options: argparse.Namespace) -> list[Outcome]:
    """Return the pairs that are not run again, from the record that is written."""
    if options.only is None or options.output is None or not Path(options.output).exists():
        return []
    pairs = json.loads(Path(options.output).read_text())["figures"]["pairs"]
    kept = [Outcome(**pair | {"failures": tuple(pair["failures"])}) for pair in pairs.values()]
    return [outcome for outcome in kept if not outcome.python.startswith(f"{options.only}.")]


def run_pair(python: str, torch: str, tests: list[str], options: argparse.Namespace) -> Outcome:
    """Build and test one pair in a new folder, which is removed unless a step fails."""
    outcome = Outcome(python, torch, commit=call(["git", "rev-parse", "HEAD"], ROOT).strip())
    folder: Path = options.work.resolve() / f"{python}-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    print(f"== Python {python}, torch {torch}", flush=True)
    try:
        folder.mkdir(parents=True)
        prepare(outcome, folder, tests, options)
        shutil.rmtree(folder)
    except NotRun as reason:
        outcome.not_run = str(reason)
        print(f"   not run: {reason}", flush=True)
    except Failed as error:
        outcome.failures = (str(error),)
        print(f"   FAILED: {error}", flush=True)
    return outcome


def prepare(outcome: Outcome, folder: Path, tests: list[str], options: argparse.Namespace) -> None:
    begun = time.monotonic()
    interpreter = find_interpreter(outcome.python)
    call([str(interpreter), "-m", "venv", str(folder / "venv")], folder)
    bin_ = folder / "venv" / "bin"
    outcome.pip_config_ignored = install_torch(bin_, outcome.torch, folder)
    outcome.install_seconds = round(time.monotonic() - begun, 1)
    outcome.python, outcome.torch = (
        call([str(bin_ / "python"), "-c", f"import {module}; print({version})"], folder).split()[-1]
        for module, version in (("platform", "platform.python_version()"), ("torch", "torch.__version__"))
    )

    begun = time.monotonic()
    source = folder / "source"
    copy_checkout(source)
    # With the defaults of a wheel, as a user builds it.
    environment = {"DYNSWAP_CUDA": options.cuda}
    environment |= WITHOUT_PIP_CONFIG if outcome.pip_config_ignored else {}
    locked = ["--constraint", str(source / "constraints.txt")]
    call([str(bin_ / "pip"), "install", "--quiet", *locked, f"{source}[test]"], folder, environment)
    outcome.build_seconds = round(time.monotonic() - begun, 1)

    # The tests have to import the installed package.
    shutil.rmtree(source / "dynswap_ext")
    ask = "import dynswap_ext; info = dynswap_ext.backend_info(); print(info.provider)"
    outcome.provider = call([str(bin_ / "python"), "-c", ask], source).split()[-1]
    begun = time.monotonic()
    test(outcome, source, bin_, tests)
    outcome.test_seconds = round(time.monotonic() - begun, 1)


def find_interpreter(python: str) -> Path:
    """Return an interpreter of a minor version that runs and can compile extensions."""
    ask = "import os, sys, sysconfig as s; h = os.path.join(s.get_paths()['include'], 'Python.h'); "
    ask += "print(*sys.version_info[:2], os.path.exists(h), sep='.')"
    for path in dict.fromkeys(candidates(python)):
        try:
            done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == f"{python}.True":  # a launcher of pyenv may have no interpreter
            return path
    raise NotRun(f"there is no Python {python} with its headers on PATH, nor under pyenv")


def candidates(python: str) -> Iterator[Path]:
    yield Path(sys.executable)
    for folder in os.get_exec_path():
        yield Path(folder) / f"python{python}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{python}.*/bin/python"))


def install_torch(bin_: Path, torch: str, folder: Path) -> bool:
    """Install a minor version of torch; return whether pip's local configuration had to be ignored."""
    command = [str(bin_ / "pip"), "install", "--quiet", f"torch=={torch}.*"]
    try:
        call(command, folder)
        return False
    except Failed:
        pass
    try:
        call(command, folder, WITHOUT_PIP_CONFIG)
        return True
    except Failed as error:
        raise NotRun(str(error)) from None


def copy_checkout(into: Path) -> None:
    """Copy all files that git tracks or would track, without build results."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def test(outcome: Outcome, source: Path, bin_: Path, tests: list[str]) -> None:
    report = source / "report.xml"
    command = [str(bin_ / "pytest"), "-q", "--no-header", f"--junitxml={report}", *tests]
    command += [f"--ignore=tests/{name}" for name in LEFT_OUT]
    ours = ("DYNSWAP_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    subprocess.run(command, cwd=source, env=kept, check=False)
    if not report.exists():
        raise Failed(f"`{' '.join(command[1:])}` ended without a report")
    cases = list(ET.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    outcome.failures = tuple(f"{case.get('classname')}.{case.get('name')}" for case in failed)
    outcome.failed = len(failed)
    outcome.skipped = sum(case.find("skipped") is not None for case in cases)
    outcome.passed = len(cases) - outcome.failed - outcome.skipped


def call(command: list[str], folder: Path, more: dict[str, str] | None = None) -> str:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | (more or {})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
    raise Failed(f"`{' '.join(command[1:])}`: {(wrong or lines or ['no message'])[0].strip()[:300]}")


def table(outcomes: list[Outcome]) -> str:
    """Return a table with a line for each pair."""
    head = (
        "Python",
        "torch",
        "provider",
        "passed",
        "failed",
        "skipped",
        "install s",
        "build s",
        "tests s",
        "",
    )
    rows = [head]
    for each in outcomes:
        counts = (each.passed, each.failed, each.skipped)
        seconds = (each.install_seconds, each.build_seconds, each.test_seconds)
        more = f"not run: {each.not_run}" if each.not_run else "; ".join(each.failures[:3])
        rows.append((each.python, each.torch, each.provider, *map(str, counts), *map(str, seconds), more))
    return "\n".join("  ".join(f"{cell:<12}" for cell in row).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
