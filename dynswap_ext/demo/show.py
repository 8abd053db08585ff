"""Progress bars and tables of the demo."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynswap_ext.demo.contender import Outcome
from dynswap_ext.demo.files import Watcher
from dynswap_ext.demo.run import INSTALLED, RESIDENT, DemoResult
from dynswap_ext.demo.units import show_bytes, show_seconds


class BarWatcher(Watcher):
    """A bar for each piece of work, one under the other."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, what: str, total: int) -> None:
        """A new bar; the one before is over."""
        self._task = self._progress.add_task(what, total=total)

    def step(self, count: int = 1) -> None:
        """Move the bar on."""
        if self._task is not None:
            self._progress.advance(self._task, count)


@contextmanager
def bars(console: Console) -> Iterator[BarWatcher]:
    """Progress bars on a console, while the block runs."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        yield BarWatcher(progress)


def show(result: DemoResult, console: Console) -> None:
    """The facts of the run, the table, and what it says."""
    config, options = result.config, result.options
    masters = "RAM" if result.in_memory else "mapped from the file"
    facts = Table.grid(padding=(0, 2))
    rows = {
        "model": f"decoder, {config.layers} layers of width {config.hidden}, "
        f"{config.parameters / 1e6:.0f} M parameters, {show_bytes(result.model_bytes)}; masters: {masters}",
        "device": result.device,
        "budget": f"{show_bytes(result.budget)} ({result.budget / result.model_bytes:.0%} of the file), "
        f"prefetch {options.prefetch}",
        "bandwidth": f"{show_bytes(result.bandwidth)}/s ({result.bandwidth_kind}, measured in this run)",
    }
    for name, value in rows.items():
        facts.add_row(f"[bold]{name}", value)
    console.print(facts)
    console.print(_table(result))
    for line in _conclusions(result):
        console.print(line)


def _table(result: DemoResult) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for name, outcome in result.outcomes.items():
        detail = f"\n({outcome.provider}, {outcome.backend})" if name == INSTALLED.name else ""
        table.add_column(name + detail, justify="right", style="bold" if name == INSTALLED.name else "")
    table.add_column("limit", justify="right")
    limit = result.limit_seconds

    def row(title: str, cell: Callable[[str, Outcome], str], last: str = "") -> None:
        table.add_row(title, *(cell(name, outcome) for name, outcome in result.outcomes.items()), last)

    row("time a pass", lambda _, o: show_seconds(statistics.median(o.seconds)), show_seconds(limit))
    row("  fastest", lambda _, o: show_seconds(min(o.seconds)))
    row("  slowest", lambda _, o: show_seconds(max(o.seconds)))
    row(
        "  of the limit",
        lambda _, o: "-" if limit is None else f"{statistics.median(o.seconds) / limit:.2f}x",
    )
    row("stalls a pass", lambda _, o: show_seconds(o.stall_seconds_per_pass))
    row("peak memory", lambda _, o: show_bytes(o.peak_bytes))
    row("moved a pass", lambda _, o: show_bytes(o.moved_bytes_per_pass))
    row("from disk a pass", lambda _, o: show_bytes(o.disk_bytes_per_pass))
    row("outputs", lambda name, _: _verdict(name, result))
    return table


def _verdict(name: str, result: DemoResult) -> str:
    if name == RESIDENT.name:
        return "reference"
    return "[red]differ" if name in result.differing else "bit-equal"


def _conclusions(result: DemoResult) -> Iterator[str]:
    yield (
        "classic hook: a Python __getattr__ that calls .to() at each access. "
        "limit: max(time of the resident model, bytes moved by dynswap / bandwidth). Peak memory: "
        + (
            "allocated on the device."
            if "cuda" in result.device
            else "resident set above the start of the run."
        )
    )
    if not result.in_memory:
        yield (
            "Every way but the resident one begins each pass with none of the file in the page cache, as on "
            "a machine whose memory it does not fit."
        )
    installed = result.outcomes[INSTALLED.name]
    if installed.provider != "native":
        yield "[yellow]The native extension is not active; `dynswap info` says why."
    if result.differing:
        yield f"[bold red]Outputs differ from the resident model's: {', '.join(result.differing)}"
