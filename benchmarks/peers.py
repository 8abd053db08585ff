"""Compares dynswap with what users would pick: every baseline on every workload, in one run.

A workload is a model with random weights and a cycle of calls (head_to_head/workloads.py). A baseline is a
way to run it (head_to_head/baselines, one file for each family). Each baseline has a process of its own,
with warm-up and calls that are timed one by one. Its outputs are compared with the resident model's. For
each workload there are two tables:

ram     Weights are in RAM. On the CPU they compute there too, so nothing has to move, and the table compares
        the cost of every access. For an accelerator they cross the bus.
file    Weights are in a checkpoint file that is not in the page cache when a call begins, as on a machine
        whose memory the model does not fit. Baselines that only know weights in RAM are left out.

If nothing moves, every baseline runs the same kernels on the same bytes, and times differ by chance, as do
those of the resident model and ours. A peer has to be faster by more than that to be ahead (except for
`narrow`, which does nothing but accesses).

The limit is max(time of the resident model, bytes moved / bandwidth measured in this run). The peers come
with `pip install 'dynswap-ext[peers]'`. The row of one that cannot run has the reason.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from common import Record, parser
from dynswap_ext.demo.model import cache_folder
from dynswap_ext.planning.rates import pinned_bandwidth
from head_to_head import table
from head_to_head.apart import Apart
from head_to_head.baselines import BASELINES, RESIDENT, Baseline
from head_to_head.baselines.base import EXTRA
from head_to_head.disk import most_bytes_a_second
from head_to_head.job import FILE, PLACEMENTS, RAM, Job, Row
from head_to_head.table import Section
from head_to_head.workloads import SIZES, WORKLOADS, Workload

#: By size: seconds of timed calls for a baseline, and (below) of the whole run.
_SECONDS = {"tiny": 0.0, "cpu": 0.25, "gpu": 0.3}
_TOTAL = {"tiny": 600.0, "cpu": 290.0, "gpu": 470.0}


class Contest:
    """Runs the baselines of one workload after the other, and keeps their rows."""

    def __init__(self, given: Any, record: Record, folder: Path) -> None:
        self._given, self._record, self._folder = given, record, folder
        self._device = torch.device(given.device)
        self._apart = Apart(fork=given.start == "fork")
        self._end = time.monotonic() + given.total
        self._console = table.console()
        self._disk: float | None = None
        self._bus: float | None = None

    def run(self, workload: Workload) -> None:
        """Measure and show every table of a workload."""
        self._console.rule(workload.name)
        missing = workload.package and importlib.util.find_spec(workload.package) is None
        failure = f"the workload needs {workload.package}: {EXTRA}" if missing else ""
        path = self._folder / f"{workload.model}.safetensors"
        if not failure and not path.exists() and self._left(1) > 0:
            failure = self._apart.run(self._job(workload, "", RAM), self._left(120), write=True).failure
        for placement in self._given.placement:
            section = self._section(workload, placement, path)
            mine = [
                baseline
                for baseline in BASELINES.values()
                if self._wanted(baseline) and baseline.has(placement, self._device)
            ]
            # The baselines take turns, as the machine's speed may change.
            for _ in range(self._given.rounds or (workload.rounds if placement == RAM else 1)):
                for baseline in mine:
                    row = section.rows.get(baseline.name)
                    if row is not None and row.failure:
                        continue
                    why = failure or self._why_not(baseline, workload)
                    more = Row(failure=why) if why else self._run_baseline(workload, baseline, placement)
                    section.rows[baseline.name] = row.joined(more) if row else more
            if any(row.seconds for row in section.rows.values()):
                table.show(section, self._console)
            else:
                reasons = dict.fromkeys(row.failure for row in section.rows.values())
                print(f"{workload.name}, {PLACEMENTS[placement]}: no baseline ran: {'; '.join(reasons)}")
            self._keep(section)

    def _run_baseline(self, workload: Workload, baseline: Baseline, placement: str) -> Row:
        job = self._job(workload, baseline.name, placement)
        Path(job.scratch).mkdir(parents=True, exist_ok=True)
        try:
            return self._apart.run(job, self._left(self._given.limit))
        finally:
            if baseline.rewrites:
                shutil.rmtree(job.scratch, ignore_errors=True)

    def _why_not(self, baseline: Baseline, workload: Workload) -> str:
        if self._left(1) <= 0:
            return f"the time of the run was over (--total {self._given.total:.0f})"
        if baseline.compiles and workload.not_compiled:
            return workload.not_compiled
        return baseline.why_not(self._device)

    def _wanted(self, baseline: Baseline) -> bool:
        wanted = self._given.baselines
        return not wanted or baseline.name == RESIDENT or baseline.name in wanted

    def _left(self, at_most: float) -> float:
        return min(at_most, self._end - time.monotonic())

    def _job(self, workload: Workload, baseline: str, placement: str) -> Job:
        scratch = self._folder / "written" / workload.model / baseline.replace(" ", "_").replace(",", "")
        return Job(
            workload=workload.name,
            size=self._given.size,
            baseline=baseline,
            placement=placement,
            device=str(self._device),
            checkpoint=str(self._folder / f"{workload.model}.safetensors"),
            scratch=str(scratch),
            reference=str(self._folder / f"{workload.name}.outputs.pt"),
            seconds=self._given.seconds,
            patience=self._given.limit / 4,
        )

    def _section(self, workload: Workload, placement: str, path: Path) -> Section:
        bandwidth, kind = None, ""
        if placement == FILE and path.exists():
            bandwidth, kind = self._disk_bandwidth(path), "disk, read around the page cache"
        elif self._device.type == "cuda":
            self._bus = self._bus or pinned_bandwidth(self._device)
            bandwidth, kind = self._bus, "copies from pinned memory"
        return Section(
            workload=workload.name,
            title=f"{workload.describe()}; {str(workload.dtype).removeprefix('torch.')}",
            placement=placement,
            device=str(self._device),
            unit=workload.unit,
            weight_bytes=path.stat().st_size if path.exists() else 0,
            bandwidth=bandwidth,
            bandwidth_kind=kind,
        )

    def _disk_bandwidth(self, path: Path) -> float:
        """Return the most bytes per second that the disk has reached in this run."""
        self._disk = max(self._disk or 0.0, most_bytes_a_second(path))
        return self._disk

    def _keep(self, section: Section) -> None:
        figures = self._record.figures.setdefault(section.workload, {})
        figures[section.placement] = section.to_record()
        self._bars(section)
        self._record.write(self._given.output)

    def _bars(self, section: Section) -> None:
        name = f"{section.workload}, {PLACEMENTS[section.placement]}"
        ours, resident = section.median(section.ours) if section.ours else None, section.median(RESIDENT)
        if not section.ours or ours is None:
            if resident is not None:
                self._record.bar(f"{name}: ours runs", 0, at_least=1)
            return
        self._record.bar(
            f"{name}: {section.ours}, outputs equal to the bit",
            section.equal(section.ours),
            at_least=1,
        )
        peer = section.best_peer()
        if peer:
            tie = ", a tie" if section.tied(peer) else ""
            best = section.ratio(peer, ours) or 0.0
            # If nothing moves, all do the same work, and none can be ahead by more than chance.
            alike = 1.0 if section.workload == "narrow" else 1 / section.noise()
            self._record.bar(f"{name}: best peer ({peer}{tie}) / ours", best, at_least=alike)
        if section.workload == "narrow" and section.placement == RAM and self._device.type == "cpu":
            self._record.bar(
                f"{name}: ours / untouched", section.ratio(section.ours, resident) or 0, at_most=0.95
            )
        if self._device.type == "cuda" and section.workload != "narrow":
            ratio = section.ratio(section.ours, section.limit(section.ours))
            self._record.bar(f"{name}: ours / limit", ratio or 0.0, at_most=1.05)


def main() -> int:
    options = parser(__doc__)
    listed = {"type": lambda text: text.split(",")}
    options.add_argument("--size", choices=SIZES, help="default: gpu on an accelerator, else cpu")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", **listed, help=f"workloads, with commas: {', '.join(WORKLOADS)}")
    options.add_argument(
        "--baselines", type=lambda text: text.split(";"), help="some, by name, with semicolons; see --list"
    )
    options.add_argument("--list", action="store_true", help="the names of all baselines")
    options.add_argument("--placement", **listed, help="ram, file or both (default: ram,file; ram on CUDA)")
    options.add_argument("--seconds", type=float, help="of timed calls for each baseline, at least")
    options.add_argument("--rounds", type=int, help="how often each baseline's process is run, in turn")
    options.add_argument("--limit", type=float, default=45, help="seconds for one baseline")
    options.add_argument("--total", type=float, help="seconds for all; what is finished by then is written")
    options.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="spawn: each process imports for itself, some seconds slower (default: %(default)s)",
    )
    options.add_argument("--folder", type=Path, default=cache_folder(), help="on the disk to be measured")
    given = options.parse_args()
    if given.list:
        print("\n".join(BASELINES))
        return 0
    cpu = torch.device(given.device).type == "cpu"
    given.size = "tiny" if given.tiny else given.size or ("cpu" if cpu else "gpu")
    given.placement = given.placement or ([RAM, FILE] if cpu else [RAM])
    given.seconds = _SECONDS[given.size] if given.seconds is None else given.seconds
    given.total = _TOTAL[given.size] if given.total is None else given.total
    given.rounds = 1 if given.tiny else given.rounds
    for name, known in (("only", WORKLOADS), ("baselines", BASELINES), ("placement", PLACEMENTS)):
        unknown = [each for each in getattr(given, name) or [] if each not in known]
        if unknown:
            options.error(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    record = Record("peers" if cpu else "peers_cuda", given.size == "tiny")
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="peers-") as folder:
        contest = Contest(given, record, Path(folder))
        for name, cls in WORKLOADS.items():
            if not given.only or name in given.only:
                contest.run(cls(given.size))
    table.explain(table.console())
    return record.finish(given.output)


if __name__ == "__main__":
    sys.exit(main())
