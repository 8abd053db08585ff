"""Guards the costs of an access, a forward and an install: none may rise above a baseline unnoticed.

    make ratios                             measures, and compares with benchmarks/results/ratios.json
    make ratios RATIOS_ARGS='--renew 5'     measures five times, and keeps that as the baseline

A change that raises a figure renews the baseline in the same commit, and says what it gains.

A ratio is that of two times in one run: ours, and that of the same work on a plain module or with the
classic hook. It has risen if its median is above the highest of the baseline by more than this run's noise,
which is how far the same plain work differs from itself. Counts have no such noise: Python's calls, system
calls and bytes moved may not be above the highest of the baseline. Instructions (with valgrind) may be 3 %
above it: the layout of memory, which depends on the length of a path, changes them by up to 1 %. Counts of
calls and instructions are those of one Python and one torch, and are compared only with the same versions.

Exit status: 1 if a figure has risen.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gauges
from common import RESULTS, Record, parser
from ratio_workloads import MOVED, WORKLOADS, Gauge, Work, Workload
from records import Sample

ROUNDS: Final = 15
#: How often all is measured again when a figure has risen. The least value counts: other work only adds.
REPEATS: Final = 2
WARM_UP: Final = 3
RATIO, PYTHON, SYSTEM, INSTRUCTIONS, BYTES = (
    "time / reference",
    "Python's calls",
    "system's calls",
    "instructions",
    "bytes moved",
)
#: The share by which figures of a kind may be above the highest of the baseline. For ratios it is the noise.
SHARES: Final = {INSTRUCTIONS: 0.03}
#: Values of one run, by the kind of figure and the name of the workload.
Figures = dict[str, dict[str, float]]


def times(works: Mapping[str, Work], rounds: int) -> tuple[dict[str, float], float]:
    """Return the median ratio of each workload's time to its reference's, and the noise of this run.

    A workload and its reference are measured one after the other. The noise is that of the reference,
    measured twice in a row.
    """
    by_name = {each.name: each for each in WORKLOADS}
    ratios: dict[str, list[float]] = {}
    for _ in range(rounds):
        for each in WORKLOADS:
            reference = by_name[each.against or each.name]
            before = _seconds(reference, works[reference.name])
            ratios.setdefault(each.name, []).append(_seconds(each, works[each.name]) / before)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    same = [medians.pop(each.name) for each in WORKLOADS if each.against is None]
    return medians, max(abs(ratio - 1) for ratio in same)


def _seconds(workload: Workload, work: Work) -> float:
    """Return the seconds of one repetition of one part."""
    gauge = gauges.Seconds()
    work(gauge, workload.times)
    return gauge.total / workload.times / workload.parts


def counted(workload: Workload) -> int:
    """Return how often a workload is repeated for a count."""
    return max(1, workload.times // 10)


def count_in_this_process(how: str) -> None:
    """Do all workloads under gauges that are read from outside the process."""
    marks: Callable[[str], Gauge] = gauges.Toggle if how == INSTRUCTIONS else gauges.Marks
    for each in WORKLOADS:
        with each.prepare() as work:
            work(gauges.Seconds(), WARM_UP)
            work(marks(each.name), counted(each))


def _for_each(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts of one repetition of one part."""
    named = {each.name: counted(each) * each.parts for each in WORKLOADS}
    return {name: round(count / named[name], 2) for name, count in counts.items()}


@contextmanager
def prepared() -> Iterator[dict[str, Work]]:
    """Prepare all workloads, and warm them up."""
    with ExitStack() as stack:
        works = {each.name: stack.enter_context(each.prepare()) for each in WORKLOADS}
        for work in works.values():
            work(gauges.Seconds(), WARM_UP)
        yield works


def measure(rounds: int) -> tuple[Figures, float]:
    """Return all figures of one run, and its noise."""
    figures: Figures = {}
    with prepared() as works:
        figures[RATIO], noise = times(works, rounds)
        calls = {}
        for each in WORKLOADS:
            gauge = gauges.PythonCalls()
            works[each.name](gauge, counted(each))
            calls[each.name] = gauge.total
        figures[PYTHON] = _for_each(calls)
    for how, count in ((SYSTEM, gauges.system_calls), (INSTRUCTIONS, gauges.instructions)):
        found = count([sys.executable, __file__, "--count", how])
        if found is None:
            print(f"{how} are not counted: {'strace' if how == SYSTEM else 'valgrind'} is not there")
        else:
            figures[how] = _for_each(found)
    figures[BYTES] = {name: float(moved()) for name, moved in MOVED.items()}
    return figures, noise


def together(runs: Iterable[Figures]) -> dict[str, dict[str, Any]]:
    """Return the median and the spread of each figure of several runs."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for kind, values in run.items():
            for name, value in values.items():
                found.setdefault(kind, {}).setdefault(name, []).append(value)
    return {k: {n: Sample.of(v).__dict__ for n, v in values.items()} for k, values in found.items()}


def unmoved(kind: str, known: Mapping[str, float], noise: float) -> tuple[float, float]:
    """Return the range in which a figure has not moved."""
    share = noise if kind == RATIO else SHARES.get(kind, 0)
    return known["low"] * (1 - share), known["high"] * (1 + share)


def compare(figures: Figures, baseline: Mapping[str, Any], noise: float) -> tuple[Table, list[str]]:
    """Return a table of all figures, and a line on each that has moved up."""
    table = Table("", "figure", "baseline", "at most", "now", "", box=None, padding=(0, 1))
    moved: list[str] = []
    others = _other_versions(baseline)
    for kind, values in figures.items():
        for place, (name, value) in enumerate(values.items()):
            known = baseline["figures"].get(kind, {}).get(name)
            least, most = (None, None) if known is None else unmoved(kind, known, noise)
            verdict = Text()
            if most is None or (others and kind in (PYTHON, SYSTEM, INSTRUCTIONS)):
                verdict = Text(f"not compared: {others or 'new'}", style="yellow")
            elif value > most:
                verdict = Text("MOVED UP", style="bold red")
                moved.append(f"{kind}, {name}: {value:.5g}, at most {most:.5g}")
            elif value < least:
                verdict = Text("better: renew the baseline", style="green")
            table.add_row(
                Text(kind if place == 0 else "", style="bold"),
                name,
                "" if known is None else f"{known['median']:.5g}",
                "" if most is None else f"{most:.5g}",
                f"{value:.5g}",
                verdict,
            )
    return table, moved


def _other_versions(baseline: Mapping[str, Any]) -> str:
    now = {"python": platform.python_version().rpartition(".")[0], "torch": torch.__version__}
    kept = {name: baseline["versions"][name] for name in now}
    kept["python"] = kept["python"].rpartition(".")[0]
    return ", ".join(f"{name} was {kept[name]}" for name in now if now[name] != kept[name])


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--renew", type=int, metavar="N", help="measure N times, and keep that")
    options.add_argument("--count", help="for the script itself")
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.count:
        count_in_this_process(given.count)
        return 0
    rounds = 1 if given.tiny else ROUNDS
    console = Console(highlight=False, width=130)
    if given.renew:
        record = Record("ratios", given.tiny)
        runs = [measure(rounds) for _ in range(given.renew)]
        record.figures.update(together(figures for figures, _ in runs), noise=[noise for _, noise in runs])
        return record.finish()
    baseline = json.loads((RESULTS / "ratios.json").read_text())
    figures, noise = measure(rounds)
    table, moved = compare(figures, baseline, noise)
    for _ in range(REPEATS):
        if not moved:
            break
        # Other work on the machine may have caused it, and may have ended.
        again, more_noise = measure(rounds)
        noise = max(noise, more_noise)
        figures = {k: {n: min(v, again[k][n]) for n, v in values.items()} for k, values in figures.items()}
        table, moved = compare(figures, baseline, noise)
    console.print(table)
    console.print(f"noise of this run: {noise:.0%}; {len(moved)} figure(s) have moved up", *moved, sep="\n  ")
    return int(bool(moved) and not given.tiny)


if __name__ == "__main__":
    sys.exit(main())
