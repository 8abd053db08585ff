"""Everything that needs a GPU, with one command: `python benchmarks/gpu_suite.py`.

The parts, most telling first: the build, a model that gets to the device in every way there is, the tests of
tests/cuda (which may not be skipped), residents that give way over expandable segments, the bandwidth of the
bus, a stack of layers at compute:copy 0.2, 1 and 5 and with a cast, a checkpoint streamed from disk, loading
onto the device, the contract's tests, the peers, training steps, access, install, and compute-sanitizer's
memcheck.

`--check` first prints what is missing here, and for which parts. The whole ends within `--time-limit`
seconds. Each part is a process of its own with its share of that time. Time that it leaves over is shared by
all later parts; at its limit it is killed. The record is written before and after each part, so a run that
is cut off leaves what it had. A table of all parts comes last.

Needs Python, torch and a CUDA toolkit. Parts that need more (pytest, hypothesis, safetensors, rich) are left
out without it. `--dry-run` runs every part at tiny sizes, on the CPU if there is no GPU, which proves that
they start. It runs the build up to the compiler, and only collects the tests' names.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import Record, parser
from dynswap_ext.demo.model import cache_folder
from suite_parts import (
    BARS,
    FAILED,
    LATE,
    ROOT,
    SKIPPED,
    STOPPED,
    Part,
    Result,
    Runner,
    Stopped,
    bars_of,
    last_line,
    limit_of,
    stop_on_signals,
)

HERE = Path(__file__).resolve().parent
#: Seconds that are kept for the table, and for the record after the last part.
_RESERVE = 6.0
_LEAST = 3.0  # a part with less time than this cannot even import torch
_SHOWN_OF_FAILED = 25  # lines
_TRAINED = "dynswap,classic hook,accelerate cpu_offload"
_TRAINED_DRY = "dynswap"  # the other baselines are slow to train, and other parts start them
_RATIOS = ("--ratio", "0.2", "5", "1", "--cast")
#: The rows that run. Each is a process that imports torch, which may take five seconds.
_PEERS = (
    *("--only", "narrow,decode"),
    *("--baselines", "ours, 1/4;classic hook;classic hook, pinned;accelerate cpu_offload;mmgp"),
)

_NATIVE = (
    "import sys, torch; from dynswap_ext import _provider; "
    "sys.exit(_provider.native_unavailable(torch.device('cuda')) or None)"
)


def build(dry_run: bool) -> Part:
    """Compile for the device of this machine, on all cores, and prove that the result serves it."""
    python = sys.executable
    info, said = [[python, "-m", "dynswap_ext", "info"]], "CUDA backend"
    if absent("rich"):  # the tables of `info` need rich
        info = []
    if dry_run:  # the toolkit, the sources and the flags are put together; nothing is compiled
        return Part("build", ([python, "setup.py", "build_ext", "--help"], *info), share=80, line=said)
    major, minor = torch.cuda.get_device_capability()
    environment = {
        "DYNSWAP_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}"),
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0)))),
    }
    compiling = [python, "setup.py", "build_ext", "--inplace"]
    commands = (compiling, *info, [python, "-c", _NATIVE])
    return Part("build", commands, share=80, environment=environment, line=said)


def absent(*modules: str) -> str:
    """Return which of the modules cannot be imported, as a text for `Part.missing`."""
    names = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed" if names else ""


def pytests(name: str, *arguments: str, share: float, dry_run: bool, **environment: str) -> Part:
    """Return a part of tests that may not be skipped for lack of a GPU. A dry run only collects them."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=short"]
    # If a module cannot be imported, only its tests are lost. A test that hangs prints where it is.
    command += ["--continue-on-collection-errors", "-o", "faulthandler_timeout=60", *arguments]
    if dry_run:  # `make test-cuda` runs them on a pretend device
        command += ["--collect-only"]
    elif not absent("xdist") and "-n" not in arguments:
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"]
    environment = {"DYNSWAP_REQUIRE_CUDA": "1", "OMP_NUM_THREADS": "1", **environment}
    needs = absent("pytest", "hypothesis")
    return Part(name, (command,), share=share, environment=environment, missing=needs, line=" in ")


def memcheck(dry_run: bool) -> Part:
    """Return a part that runs a small stack of layers under compute-sanitizer, or without it in a dry run.

    torch's caching allocator is off: within one of its blocks, no overrun would be seen.
    """
    script = [sys.executable, str(HERE / "gpu_stack.py"), "--device", device_of(dry_run)]
    small = [*script, "--tiny", "--cast", "--ours"]
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    # Errors of the driver's functions are not reported: the engine asks for what may be refused.
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    wrapper = [] if dry_run else [found or "", *options]
    missing = "" if dry_run or found else "compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin"
    return Part(
        "memcheck",
        ([*wrapper, *small],),
        share=40,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        missing=missing,
        line="SUMMARY",
    )


def device_of(dry_run: bool) -> str:
    """Return the device that the scripts use.

    A dry run takes a GPU, or the tests' pretend one, if there is one.
    """
    return "cuda" if not dry_run or torch.cuda.is_available() else "cpu"


def parts(dry_run: bool, folder: str) -> list[Part]:
    device = device_of(dry_run)

    def script(
        name: str,
        *more: str,
        share: float,
        shows: tuple[str, ...],
        part: str = "",
        limit: str = "",
        needs: str = "",
    ) -> Part:
        tiny = ["--tiny"] if dry_run else []
        command = [sys.executable, str(HERE / f"{name}.py"), "--device", device, *tiny, *more]
        return Part(part or name, (command,), share, "--output", limit, missing=needs, shows=shows)

    def tested(name: str, *arguments: str, share: float, **environment: str) -> Part:
        return pytests(name, *arguments, share=share, dry_run=dry_run, **environment)

    on_disk, size = ["--folder", folder], [] if dry_run else ["--size", "gpu"]
    semantics = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_semantics_*.py"))
    return [
        build(dry_run),
        script("gpu_smoke", part="smoke", share=45, shows=("differ",)),
        tested("tests", "tests/cuda", share=50),
        tested(
            "expandable segments",
            "tests/cuda/test_giving_way_on_a_card.py",
            *("-n", "0"),
            share=35,
            PYTORCH_ALLOC_CONF="expandable_segments:True",
        ),
        script("bandwidth", share=12, shows=("GB/s", "registered")),
        script("gpu_stack", *_RATIOS, part="stack", share=120, shows=("time / limit",)),
        script(
            "stream",
            *on_disk,
            *("--size", "500MB", "--budget", "128MiB", "--rounds", "1"),
            part="checkpoint",
            share=45,
            shows=("/ dd", "/ copies", "/ limit", "equal"),
            needs=absent("safetensors"),
        ),
        script(
            "load",
            *on_disk,
            *("--size", "500MB", "--rounds", "1"),
            share=35,
            shows=("GB/s", "skeleton: ms"),
            needs=absent("safetensors"),
        ),
        tested("contract tests", "tests/contract", *semantics, "-k", "native-cuda", share=75),
        script(
            "peers",
            *on_disk,
            *size,
            *_PEERS,
            share=140,
            shows=("/ limit", "/ ours"),
            limit="--total",
            needs=absent("rich"),
        ),
        script(
            "train",
            *on_disk,
            *("--size", "500MB", "--only", _TRAINED_DRY if dry_run else _TRAINED),
            share=60,
            shows=("/ limit", "gradients are right", "/ resident"),
        ),
        script(
            "activations",
            *("--tokens", "4096", "--bound", "1GiB", "--only", "save_on_cpu,trl,dynswap"),
            share=45,
            shows=("/ plain", "/ limit", "hits"),
        ),
        script("access", share=10, shows=("native, copy",)),
        script("install", share=10, shows=("native: us",)),
        memcheck(dry_run),
    ]


def tells(part: Part, result: Result) -> str:
    """Return the figures of a part as text, one a line."""
    if result.reason:
        return result.reason
    bars = bars_of(result.record)
    shown = [bar for bar in bars if any(word in bar["name"] for word in part.shows)]
    bounded = [bar for bar in bars if bar.get("at_most") is not None or bar.get("at_least") is not None]
    words = [f"{bar['name']} {bar['value']:.4g}" for bar in shown[:4]]
    words += [text.strip("= ") for text in result.output.splitlines() if part.line and part.line in text][-1:]
    if bounded:
        words.append(f"{sum(bar['reached'] for bar in bounded)} of {len(bounded)} bars reached")
    return "\n".join(words) if words else last_line(result.output)


def table(done: list[tuple[Part, Result]]) -> str:
    """Return a table with a row for each part, and a line for each of its figures."""
    width = max((len(part.name) for part, _ in done), default=4)
    rows = [f"{'part':<{width}}  {'state':<11}  {'s':>4}  {'limit':>5}  figures"]
    for part, result in done:
        seconds = f"{result.seconds:>4.0f}  {result.limit_seconds:>5.0f}"
        begin = f"{part.name:<{width}}  {result.state:<11}  {seconds}  "
        first, *more = tells(part, result).splitlines() or [""]
        rows += [begin + first, *(" " * len(begin) + line for line in more)]
    return "\n".join(["gpu_suite", *(row.rstrip() for row in rows)])


def check(chosen: list[Part]) -> int:
    """Print what would be left out here, and how to get it. Return 1 if nothing would run, else 0."""
    for part in chosen:
        print(f"{part.name:<20} {part.missing or 'ready'}")
    lacking = [part.missing for part in chosen if part.missing]
    print(f"{len(chosen) - len(lacking)} of {len(chosen)} parts would run.")
    if any("not installed" in missing for missing in lacking):
        print("For packages: pip install -e '.[test,bench,peers]' ninja")
    if any("compute-sanitizer" in missing for missing in lacking):
        print("compute-sanitizer comes with NVIDIA's toolkit.")
    return int(len(lacking) == len(chosen))


class Suite:
    """Runs the parts in turn and keeps their results."""

    def __init__(self, chosen: list[Part], record: Record, output: Path | None, deadline: float) -> None:
        self._chosen, self._record, self._output, self._deadline = chosen, record, output, deadline
        self._runner = Runner()
        self.done: list[tuple[Part, Result]] = []

    def run(self) -> None:
        for number, part in enumerate(self._chosen):
            remaining = self._deadline - time.perf_counter()
            limit = limit_of(part, self._chosen[number + 1 :], remaining)
            if not part.missing and limit < _LEAST:
                part = dataclasses.replace(part, missing=f"no time was left ({remaining:.0f} s)")
            print(f"== {part.name} (at most {limit:.0f} s)", flush=True)
            self._record.figures[part.name] = {"state": "under way"}
            self._record.write(self._output)
            self._keep(part, self._runner.run(part, limit))

    def stop(self, stopped: Stopped) -> None:
        """Keep the results of the part that was running, and note for later ones why they did not run."""
        if self._runner.under_way:
            part, result = self._runner.under_way
            result.reason = f"the suite was ended by {stopped}"
            self._keep(part, result)
        finished = {part.name for part, _ in self.done}
        for part in self._chosen:
            if part.name not in finished:
                self._keep(part, Result(SKIPPED, "", reason=f"the suite was ended by {stopped}"))

    def _keep(self, part: Part, result: Result) -> None:
        self.done.append((part, result))
        self._record.figures[part.name] = dataclasses.asdict(result)
        self._record.write(self._output)
        if result.state in (FAILED, LATE):
            print("\n".join(result.output.splitlines()[-_SHOWN_OF_FAILED:]), flush=True)
        said = f": {result.reason}" if result.reason else ""
        print(f"== {part.name}: {result.state} after {result.seconds:.1f} s{said}", flush=True)


def choose(every: list[Part], only: str | None) -> list[Part]:
    """Return the parts whose names begin with one of the words in `only`, separated by commas."""
    if only is None:
        return every
    words = [word.strip() for word in only.split(",")]
    strange = [word for word in words if not any(part.name.startswith(word) for part in every)]
    if strange:
        names = ", ".join(part.name for part in every)
        raise SystemExit(f"--only: no part begins with {', '.join(map(repr, strange))}; there are {names}")
    return [part for part in every if any(part.name.startswith(word) for word in words)]


def main() -> int:
    begun = time.perf_counter()
    stop_on_signals()
    options = parser(__doc__)
    options.add_argument("--dry-run", action="store_true", help="at tiny sizes, on the CPU or what there is")
    options.add_argument("--check", action="store_true", help="say what is missing here, and run nothing")
    options.add_argument("--only", help="names of parts, comma-separated, by their beginning")
    options.add_argument(
        "--time-limit", type=float, default=540, help="seconds for all of it (default: %(default)s)"
    )
    options.add_argument("--folder", type=Path, default=cache_folder(), help="where checkpoints are written")
    given: Any = options.parse_args()
    dry_run: bool = given.dry_run or given.tiny
    if not dry_run and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        print(f"torch {torch.__version__} {why}; --dry-run proves the parts on the CPU", file=sys.stderr)
        return 2
    given.folder.mkdir(parents=True, exist_ok=True)
    record = Record("gpu_suite", dry_run)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        chosen = choose(parts(dry_run, folder), given.only)
        if given.check:
            return check(chosen)
        suite = Suite(chosen, record, given.output, begun + given.time_limit - _RESERVE)
        status = 0
        try:
            suite.run()
        except Stopped as stopped:
            suite.stop(stopped)
            status = 128 + stopped.number
    written = record.write(given.output, complete=not status)
    print(table(suite.done))
    if written:
        print(f"written to {written}")
    if dry_run:
        print("a dry run at tiny sizes: the figures mean nothing, and missed bars are no failures")
    elif written and not status and given.only is None:
        print("please attach that file to an issue of the project, with what `dynswap info` prints")
    came = [result.state for _, result in suite.done]
    return status or int(any(state in (FAILED, LATE, BARS, STOPPED) for state in came))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
