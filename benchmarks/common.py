"""Bars, a record that names the machine, and options, for all benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout that is to be measured

import dynswap_ext
from dynswap_ext._util.file_mappings import drop_file_cache
from dynswap_ext.errors import DynswapError
from dynswap_ext.planning.rates import disk_bandwidth
from isolated import Isolated
from records import as_json, summary, write_whole

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Bar:
    """A figure and the bound that it has to keep."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    def __str__(self) -> str:
        bounds = [f"<= {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f">= {self.at_least:g}"] if self.at_least is not None else []
        verdict = ("reached" if self.reached else "MISSED") if bounds else ""
        return f"{self.name:<68} {self.value:>10.4g}  {' '.join(bounds):<10} {verdict}".rstrip()


@dataclass
class Record:
    """The figures of one run of one script, with the machine, the versions and the command.

    Scripts put in repeated measurements as lists. Their `summary` is written.
    """

    script: str
    tiny: bool
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def bar(
        self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        """Add a figure with a bound, and print it."""
        bar = Bar(name, value, at_most, at_least)
        self.bars.append(bar)
        print(bar, flush=True)

    def write(self, path: Path | None = None, *, complete: bool = False) -> Path | None:
        """Write the figures so far, and return where.

        A tiny run, whose figures mean nothing, needs a `path`.
        """
        if path is None:
            if self.tiny:
                return None
            path = RESULTS / f"{self.script}.json"
        content = {
            "script": self.script,
            "figures": summary(self.figures),
            "bars": [summary(dataclasses.asdict(bar)) | {"reached": bar.reached} for bar in self.bars],
            "complete": complete,
            **machine(),
        }
        write_whole(path, as_json(content) + "\n")
        return path

    def finish(self, path: Path | None = None) -> int:
        """Write the record, and return the exit status: 1 if a bar was missed. A tiny run misses none."""
        written = self.write(path, complete=True)
        if written:
            print(f"written to {written}")
        return 0 if self.tiny or all(bar.reached for bar in self.bars) else 1


def machine() -> dict[str, Any]:
    """Return the facts about a run: time, command, commit, machine, versions and backend."""
    info = dynswap_ext.backend_info()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *_command()]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", "..", ":!results")),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": f"{platform.system()} {platform.release()}",
            "accelerators": [
                torch.cuda.get_device_name(index)
                for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
            ],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dynswap_ext": dynswap_ext.__version__,
        },
        "dynswap_ext": dataclasses.asdict(info),
    }


def run_apart(run: Callable[[Any], Any], job: Any) -> Any:
    """Call `run(job)` in a process of its own. Return its result, or {"failure": why the process ended}."""
    try:
        return Isolated().run(run, job)
    except DynswapError as error:
        return {"failure": str(error).splitlines()[-1][:300]}


def dd(path: Path) -> float:
    """Return the bytes per second of `dd iflag=direct bs=16M`."""
    drop_file_cache(path)
    start = time.perf_counter()
    command = ["dd", f"if={path}", "of=/dev/null", "bs=16M", "iflag=direct"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:  # a file system without direct reads
        return disk_bandwidth(path)
    return path.stat().st_size / (time.perf_counter() - start)


def native_available(device: str = "cpu") -> bool:
    """Return whether the native provider can serve the device here; print why if it cannot."""
    from dynswap_ext._provider import native_unavailable

    reason = native_unavailable(torch.device(device))
    if reason:
        print(f"the native provider is left out: {reason}")
    return not reason


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--tiny", action="store_true", help="prove that the script runs; the figures mean nothing"
    )
    made.add_argument("--output", type=Path, help="where the record goes (default: results/<script>.json)")
    return made


def _command() -> list[str]:
    """Return the command line without the option --output."""
    arguments = list(sys.argv)
    while "--output" in arguments:
        at = arguments.index("--output")
        del arguments[at : at + 2]
    return arguments


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
