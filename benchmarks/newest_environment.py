"""The virtual environment in which benchmarks/newest.py installs one row of versions after another."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from packaging.utils import canonicalize_name

import lock
import newest_verdicts
from newest_verdicts import Verdicts
from newest_versions import pinned, public

ROOT = lock.ROOT


class Failed(Exception):
    """A step that failed, so that a row has no result."""


class Environment:
    """A virtual environment with this checkout, in which one row after the other is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        #: The version of torch, which has to be the same build: it loads the checkout's extension.
        self.torch = importlib.metadata.version("torch")
        self._own = folder / "own.txt"

    def prepare(self) -> None:
        """Make the environment, unless it is there already with this torch."""
        made = self._own.read_text().splitlines() if self._own.exists() else []
        if f"torch=={self.torch}" not in made:
            shutil.rmtree(self.folder / "venv", ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            call([sys.executable, "-m", "venv", str(self.folder / "venv")])
            locked = ["--constraint", str(lock.CONSTRAINTS)]
            build = [str(need) for need in lock.group("build", platform.python_version())]
            self._pip(["install", *locked, *build])
            self._pip(["install", *locked, f"torch=={public(self.torch)}"])
            # Editable, so that the checkout itself runs, with the extension that was built in it.
            self._pip(["install", *locked, "--no-build-isolation", "--no-deps", "--editable", str(ROOT)])
            self._own.write_text(pinned(self.installed()))
        ask = "import dynswap_ext, torch; print(dynswap_ext.backend_info().provider, torch.__version__)"
        provider, version = call([str(self.bin / "python"), "-c", ask]).split()[-2:]
        if (provider, version) != ("native", torch.__version__):
            raise Failed(
                f"in {self.bin} torch is {version}, not {torch.__version__}, or {provider} is not native"
            )

    def install(self, found: Path, versions: dict[str, str]) -> None:
        """Install the versions that the resolver found, and remove what only an earlier row needed."""
        own = {line.partition("==")[0] for line in self._own.read_text().splitlines()}
        if strays := sorted(self.installed().keys() - own - versions.keys()):
            self._pip(["uninstall", "--yes", *strays])
        resolved = ["--requirement", str(found)]  # an exact version of each package
        self._pip(["install", *resolved])
        if (torch_now := self.installed()["torch"]) != self.torch:
            raise Failed(f"pip replaced torch {self.torch} by {torch_now}")

    def test(self, paths: list[str], packages: set[str]) -> Verdicts:
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(self.bin / "python"), "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
        # Tests that take `provider` run for each; a second provider tells nothing new about a library.
        command += [f"--junitxml={report}", *newest_verdicts.ARGUMENTS, "-k", "not [python", *paths]
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("DYNSWAP_", "PYTHONPATH"))
        }
        kept |= {"DYNSWAP_PROVIDER": "native", "DYNSWAP_UNLOCKED": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=kept, check=False)
        if not report.exists():
            raise Failed(f"pytest ended with status {done.returncode} and without a report")
        verdicts = newest_verdicts.read(report, packages)
        if not (verdicts.passed or verdicts.failures or verdicts.refused):
            raise Failed(f"no test ran: pytest ended with status {done.returncode}")
        return verdicts

    def installed(self) -> dict[str, str]:
        listed = self._pip(["list", "--format=freeze", "--exclude-editable"]).splitlines()
        return {
            canonicalize_name(name): version
            for name, _, version in (line.partition("==") for line in listed)
            if version
        }

    def _pip(self, arguments: list[str]) -> str:
        return call([str(self.bin / "python"), "-m", "pip", "--disable-pip-version-check", *arguments])


def call(command: list[str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"DYNSWAP_BUILD": "python"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    wrong = [line for line in lines if line.lower().lstrip().startswith("error")]
    raise Failed(f"`{' '.join(command[1:])[:200]}`: {(wrong or lines or ['no message'])[-1].strip()[:300]}")
