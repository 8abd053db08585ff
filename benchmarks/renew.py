"""Measures again what README and docs cite, and fills in the figures: `make figures`, on an idle machine.

    python benchmarks/renew.py                     # every record that this machine can make, README and docs
    python benchmarks/renew.py --only peers,disk
    python benchmarks/renew.py --age               # how old the records are; status 1 if one is too old

A record replaces the old one when its script has finished, even with a missed bar. A record of a tree too
far back (more than `MOST_COMMITS` commits, or more than one release) says little about the present one.
Records of `ELSEWHERE` are shown, and may be of any age.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = figures.RESULTS
MOST_COMMITS = 100
#: The load average above which something else is running, and the seconds to wait until a build is over.
IDLE = 0.5
MOST_WAIT = 240.0


@dataclass(frozen=True)
class Run:
    """A script with the arguments and environment that make a record."""

    script: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


#: How to make each record; those that README shows come first.
RUNS = {
    "peers": Run("peers", ("--rounds", "2", "--total", "1300")),
    "stream": Run("stream"),
    "stream_mmap_threshold": Run("stream", environment={"MALLOC_MMAP_THRESHOLD_": "1048576"}),
    "access": Run("access"),
    "train": Run("train"),
    "activations": Run("activations", environment={"MALLOC_MMAP_THRESHOLD_": "1048576"}),
    "disk": Run("disk", ("--tokens", "256", "--rounds", "2")),
    "host_memory": Run("host_memory"),
    "ranks": Run("ranks"),
    "mesh": Run("mesh"),
    "load": Run("load"),
    "convert": Run("convert"),
    "lossless": Run("lossless"),
    "experts": Run("experts"),
    "virtual_clock": Run("virtual_clock"),
    "plan": Run("plan"),
    "install": Run("install"),
    "silent_writes": Run("silent_writes"),
    "host_time": Run("host_time", ("--passes", "4000")),
    "architectures": Run("architectures"),
}
#: Records that `make figures` does not make, and how they are made.
ELSEWHERE = {
    "gpu_suite": "a machine with a GPU: python benchmarks/gpu_suite.py",
    "matrix": "make matrix, some ten minutes for each pair of Python and torch",
    "ratios": "make ratios RATIOS_ARGS='--renew 5', with the change that moves it",
}


@dataclass(frozen=True)
class Age:
    """How far back the tree is on which a record was measured."""

    record: str
    #: The commits since then; None without git or its history.
    commits: int | None
    releases: int

    @property
    def too_old(self) -> bool:
        return self.record in RUNS and (self.releases > 1 or (self.commits or 0) > MOST_COMMITS)

    def __str__(self) -> str:
        commits = "no history" if self.commits is None else f"{self.commits} commits"
        releases = f", {self.releases} releases" if self.releases else ""
        how = "; too old: make figures" if self.too_old else ""
        return f"{self.record:<22} {commits}{releases} back{how or '; ' + ELSEWHERE.get(self.record, '')}"


def ages() -> list[Age]:
    """Return the ages of the records that README and docs cite, the oldest first."""
    cited = set[str]()
    for page in (*figures.PAGES, *figures.OTHER_PAGES):
        text = page.read_text()
        cited |= {link["record"] for link in figures.LINK.finditer(text)}
        cited |= {mark.record for mark in figures.marks(text)}
    return sorted(map(age, cited), key=lambda each: (-each.releases, -(each.commits or 0), each.record))


def age(name: str) -> Age:
    record = figures.read(name)
    commits = _git("rev-list", "--count", f"{record['commit']}..HEAD")
    if commits is None:  # the commit was rewritten, so count from the record's date
        commits = _git("rev-list", "--count", f"--since={record['date']}", "HEAD")
    releases = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = record["versions"]["dynswap_ext"]
    later = releases.index(version) if version in releases else 0
    return Age(name, None if commits is None else int(commits), later)


def renew(name: str) -> bool:
    """Make one record; return whether it replaced the old one."""
    run = RUNS[name]
    made = ROOT / "build" / "figures" / f"{name}.json"
    made.parent.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    command = [sys.executable, f"benchmarks/{run.script}.py", *run.arguments, "--output", str(made)]
    with made.with_suffix(".log").open("w") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | run.environment, stdout=log, stderr=log, check=False
        )
    record: dict[str, Any] = json.loads(made.read_text()) if made.exists() else {}
    if not record.get("complete"):
        print(f"  it ended with status {done.returncode}: see {made.with_suffix('.log').relative_to(ROOT)}")
        return False
    os.replace(made, RESULTS / f"{name}.json")
    return True


def wait_until_idle() -> str:
    """Wait until nothing else runs. Return an empty text, or the reason why the wait was given up."""
    until = time.monotonic() + MOST_WAIT
    while (load := os.getloadavg()[0]) > IDLE:
        if time.monotonic() >= until:
            return f"its load average is {load:.1f}"
        time.sleep(5)
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", default=",".join(RUNS), help="these records, with commas between them")
    options.add_argument("--age", action="store_true", help="measure nothing; show how old the records are")
    options.add_argument("--busy", action="store_true", help="measure beside whatever else is running")
    given = options.parse_args(arguments)
    if given.age:
        print(*ages(), sep="\n")
        return int(any(each.too_old for each in ages()))
    names = given.only.split(",")
    if unknown := [name for name in names if name not in RUNS]:
        options.error(f"there is no record {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if not given.busy and (why := wait_until_idle()):
        options.error(f"this machine is busy ({why}), and figures would be of both; --busy measures anyway")
    failed = []
    for name in names:
        begin = time.monotonic()
        print(f"{name} ...", flush=True)
        if not renew(name):
            failed.append(name)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    figures.main([])
    if failed:
        print(f"as they were: {', '.join(failed)}")
    return int(bool(failed))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
