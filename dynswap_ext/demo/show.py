"""Progress bars and the table of the demo."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from dynswap_ext._util.tables import facts_grid
from dynswap_ext._util.units import show_bytes, show_seconds
from dynswap_ext.demo.baseline import INSTALLED, RESIDENT, Outcome
from dynswap_ext.demo.files import Progress
from dynswap_ext.demo.run import DemoResult

__all__ = ["bars", "show"]


@contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """Show a bar for each piece of work, one under the other, while the block runs."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, TimeElapsedColumn(), console=console) as shown:

        def progress(what: str, done: int, whole: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=whole)
            shown.update(tasks[what], completed=done)

        yield progress


def show(result: DemoResult, console: Console) -> None:
    """Print the facts of the run, the table, and what follows from it."""
    config, options = result.config, result.options
    masters = "RAM" if result.in_memory else "mapped from the file"
    facts = {
        "model": f"decoder, {config.layers} layers of width {config.hidden}, "
        f"{config.parameters / 1e6:.0f} M parameters, {show_bytes(result.model_bytes)}; masters: {masters}",
        "device": result.device,
        "budget": f"{show_bytes(result.budget)} ({result.budget / result.model_bytes:.0%} of the file), "
        f"prefetch {options.prefetch}",
        "bandwidth": f"{show_bytes(result.bandwidth)}/s ({result.bandwidth_kind}, measured in this run)",
    }
    console.print(facts_grid(facts.items()))
    console.print(_table(result))
    for line in _conclusions(result):
        console.print(line)


def _table(result: DemoResult) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    for name, outcome in result.outcomes.items():
        detail = f"\n({outcome.provider}, {outcome.backend})" if name == INSTALLED else ""
        table.add_column(name + detail, justify="right", style="bold" if name == INSTALLED else "")
    table.add_column("limit", justify="right")

    def row(title: str, cell: Callable[[Outcome], str], limit: str = "") -> None:
        table.add_row(title, *map(cell, result.outcomes.values()), limit)

    limit = result.limit_seconds
    row("time a pass", lambda o: show_seconds(statistics.median(o.seconds)), show_seconds(limit))
    row("  fastest", lambda o: show_seconds(min(o.seconds)))
    row("  slowest", lambda o: show_seconds(max(o.seconds)))
    row("  of the limit", lambda o: f"{statistics.median(o.seconds) / limit:.2f}x")
    row("stalls a pass", lambda o: show_seconds(o.stall_seconds_per_pass))
    row("peak memory", lambda o: show_bytes(o.peak_bytes))
    row("moved a pass", lambda o: show_bytes(o.moved_bytes_per_pass))
    row("from disk a pass", lambda o: show_bytes(o.disk_bytes_per_pass))
    equal = ["[red]differ" if name in result.differing else "bit-equal" for name in result.outcomes]
    table.add_row("outputs", "reference", *equal[1:], "")
    return table


def _conclusions(result: DemoResult) -> Iterator[str]:
    where = "allocated on the device" if "cuda" in result.device else "resident set"
    yield (
        "classic hook: a Python __getattr__ that calls .to() at each access. "
        "limit: max(fastest pass of any, bytes moved by dynswap / bandwidth). "
        f"Peak memory: {where}, above the start of the run."
    )
    if not result.in_memory:
        yield (
            f"All but {RESIDENT} begin each pass with none of the file in the page cache, as on a machine "
            "whose memory it does not fit."
        )
    if result.outcomes[INSTALLED].provider != "native":
        yield "[yellow]The native extension is not active; `dynswap info` says why."
    if result.differing:
        yield f"[bold red]Outputs differ from the resident model's: {', '.join(result.differing)}"
