"""Compares a result file with a kept one, and prints what changed: `python benchmarks/compare.py [OLD] NEW`.

OLD is results/<script>.json unless it is given. Every bar and every figure of both is compared. Figures may
be in nested dicts, repeated measurements count as a median with its spread, and records within a record
(gpu_suite's) are compared as records.

A figure has changed if it differs by more than `--threshold` of the old one, and if the two spreads do not
touch. Without a spread the threshold alone decides. For a bar it is known whether more is better.
Measurements on another machine, with other versions or another command are noted, as their figures say
little about the code.

Exit status: 1 if a bar that was reached is missed now, 2 if the files cannot be compared, else 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from records import Sample, is_record, summary

RESULTS = Path(__file__).resolve().parent / "results"

SAME, SPREAD, UP, DOWN = "same", "within the spread", "up", "down"
BETTER, WORSE, MISSED, REACHED = "better", "worse", "MISSED NOW", "reached now"
NEW, GONE, CHANGED = "new", "gone", "changed"
_QUIET = (SAME, SPREAD)
_COLOURS = {
    MISSED: "bold red",
    WORSE: "red",
    GONE: "yellow",
    CHANGED: "yellow",
    REACHED: "green",
    BETTER: "green",
}
#: Keys that tell how a part of a suite was run, not what it measured.
_LEFT_OUT = ("output", "command", "limit_seconds", "reason")
_SAMPLE = {field.name for field in dataclasses.fields(Sample)}
_LONGEST_TEXT = 100


class CannotCompare(Exception):
    """A file is no record, or the two are records of different scripts."""


@dataclass(frozen=True)
class Figure:
    """A number with its spread, or a short text."""

    value: float | str
    low: float | None = None
    high: float | None = None
    #: For a bar: whether it was reached, and whether more is better. None: no bound.
    reached: bool | None = None
    more_is_better: bool | None = None

    @property
    def bar(self) -> bool:
        return self.reached is not None

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return self.value
        spread = "" if self.low is None else f" ({_number(self.low)} .. {_number(self.high)})"
        return _number(self.value) + spread


@dataclass(frozen=True)
class Row:
    """One figure as both records have it, and the verdict on its change."""

    name: str
    old: Figure | None
    new: Figure | None
    verdict: str

    @property
    def bar(self) -> bool:
        return any(figure.bar for figure in (self.old, self.new) if figure)

    @property
    def ratio(self) -> float | None:
        values = [figure.value if figure else None for figure in (self.old, self.new)]
        old, new = values
        if isinstance(old, str) or isinstance(new, str) or old is None or new is None or old == 0:
            return None
        return new / old


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    rows: list[Row]
    notes: list[str]

    @property
    def regressed(self) -> list[str]:
        """Return the names of bars that were reached and are missed now."""
        return [row.name for row in self.rows if row.verdict == MISSED]


def read(path: Path) -> dict[str, Any]:
    """Return a record of a benchmark.

    Raises
    ------
    CannotCompare
        The file is not there, not JSON, or not what `common.Record` writes.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CannotCompare(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CannotCompare(f"{path} is not JSON: {error}") from None
    if not is_record(content):
        raise CannotCompare(
            f"{path} is not a benchmark's record: expected an object with 'script', 'figures' and 'bars', "
            "as the scripts in benchmarks/ write it with --output"
        )
    checked: dict[str, Any] = content
    return checked


def kept_record(new: dict[str, Any]) -> Path:
    """Return the path of the kept record of the same script."""
    path = RESULTS / f"{new['script']}.json"
    if not path.exists():
        kept = ", ".join(sorted(each.stem for each in RESULTS.glob("*.json"))) or "none"
        raise CannotCompare(
            f"no record of '{new['script']}' is kept in {RESULTS} (kept: {kept}); name the old file, too"
        )
    return path


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float) -> Comparison:
    """Compare two records.

    Raises
    ------
    CannotCompare
        They are of different scripts.
    """
    if old["script"] != new["script"]:
        raise CannotCompare(
            f"the old record is of '{old['script']}' and the new one of '{new['script']}': "
            "only records of one script can be compared"
        )
    before, after = figures_of(old), figures_of(new)
    names = [*before, *(name for name in after if name not in before)]
    rows = [
        Row(name, before.get(name), after.get(name), judge(before.get(name), after.get(name), threshold))
        for name in names
    ]
    return Comparison(sorted(rows, key=lambda row: not row.bar), list(differences(old, new)))


def judge(old: Figure | None, new: Figure | None, threshold: float) -> str:
    """Return what became of a figure, in a word."""
    if old is None or new is None:
        return NEW if old is None else GONE
    if old.reached and new.reached is False:
        return MISSED
    if old.reached is False and new.reached:
        return REACHED
    if isinstance(old.value, str) or isinstance(new.value, str):
        return SAME if old.value == new.value else CHANGED
    if abs(new.value - old.value) <= threshold * abs(old.value):
        return SAME
    if _touch(old, new):
        return SPREAD
    more = new.value > old.value
    better = new.more_is_better
    if better is not None:
        return BETTER if more == better else WORSE
    return UP if more else DOWN


def _touch(old: Figure, new: Figure) -> bool:
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return False
    return old.low <= new.high and new.low <= old.high


def figures_of(record: dict[str, Any], prefix: str = "") -> dict[str, Figure]:
    """Return the bars and figures of a record, flat, by their names."""
    found: dict[str, Figure] = {}
    for name, figure in _bars(record, prefix):
        number = 2
        unique = name
        while unique in found:  # a script may use a name twice
            unique, number = f"{name} ({number})", number + 1
        found[unique] = figure
    for name, figure in _flat(summary(record["figures"]), prefix):
        found.setdefault(name, figure)
    return found


def _bars(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, Figure]]:
    for bar in record["bars"]:
        if not isinstance(bar, dict) or not isinstance(bar.get("value"), (int, float)):
            continue
        better = None
        if (bar.get("at_most") is None) != (bar.get("at_least") is None):
            better = bar.get("at_least") is not None
        name = f"{prefix}{bar.get('name', '?')}".strip()
        value: float | str = float(bar["value"]) if _is_number(bar["value"]) else str(bar["value"])
        yield name, Figure(value, reached=bool(bar.get("reached", True)), more_is_better=better)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Figure]]:
    """Yield every figure in a value, with its name. `name` ends in a separator, or is empty."""
    here = name.removesuffix(" / ")
    if is_record(value):
        yield from figures_of(value, name).items()
    elif isinstance(value, dict):
        rest = value
        if value.keys() >= _SAMPLE and all(_is_number(value[key]) for key in _SAMPLE):
            spread = (float(value["low"]), float(value["high"])) if value["n"] > 1 else ()
            yield here, Figure(float(value["median"]), *spread)
            rest = {key: each for key, each in value.items() if key not in _SAMPLE}
        for key, each in rest.items():
            if key not in _LEFT_OUT:
                yield from _flat(each, name if is_record(each) and key == "record" else f"{name}{key} / ")
    elif _is_number(value):
        yield here, Figure(float(value))
    elif isinstance(value, str) and 0 < len(value) <= _LONGEST_TEXT:
        yield here, Figure(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield what else differs between the two runs, such as the machine."""
    for which, record in (("old", old), ("new", new)):
        if record.get("complete") is False:
            yield f"the {which} record is of a run that was cut off"
        if record.get("uncommitted_changes"):
            yield f"the {which} record is of code that was not committed"
    for part in ("machine", "versions", "dynswap_ext"):
        before, after = _part(old, part), _part(new, part)
        for key in dict.fromkeys([*before, *after]):
            if before.get(key) != after.get(key):
                yield f"{part}, {key}: {_said(before.get(key))}, now {_said(after.get(key))}"
    if old.get("command") != new.get("command"):
        yield f"command: {_said(old.get('command'))}, now {_said(new.get('command'))}"


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _said(value: Any) -> str:
    return "nothing" if value in (None, "", []) else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"


def show(comparison: Comparison, console: Console, title: str, everything: bool) -> None:
    """Print bars, figures that changed, and what else differs."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("bar or figure", overflow="fold")
    for heading in ("old", "new", "new / old"):
        table.add_column(heading, justify="right", no_wrap=heading == "new / old")
    table.add_column("verdict")
    shown = [row for row in comparison.rows if everything or row.bar or row.verdict not in _QUIET]
    hidden = len(comparison.rows) - len(shown)
    section = True
    for row in shown if everything else folded(shown, comparison.rows):
        if section and not row.bar:
            table.add_section()
            section = False
        cells = [str(figure) if figure else "-" for figure in (row.old, row.new)]
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        # As Text, so that a name with brackets in it is not taken for markup.
        table.add_row(*map(Text, (row.name, *cells, ratio)), Text(row.verdict, _COLOURS.get(row.verdict, "")))
    console.print(table)
    if hidden:
        console.print(f"{hidden} more figures are the same or within their spread (--all shows them)")
    for note in comparison.notes:
        console.print(Text(f"note: {note}", "yellow"))
    regressed = comparison.regressed
    said = f"missed now: {'; '.join(regressed)}" if regressed else "no bar that was reached is missed"
    console.print(Text(said, "bold red" if regressed else "green"))


def folded(shown: list[Row], every: list[Row]) -> Iterator[Row]:
    """Yield the rows to show.

    All figures of a part that only one record has, as a baseline, become one row.
    """
    kept = [row.name for row in every if row.verdict not in (NEW, GONE)]
    counts: dict[tuple[str, str], int] = {}
    for row in shown:
        if row.bar or row.verdict not in (NEW, GONE):
            yield row
            continue
        parts = row.name.split(" / ")
        starts = [" / ".join(parts[:end]) + " / " for end in range(1, len(parts))]
        alone = next((start for start in starts if not any(name.startswith(start) for name in kept)), "")
        if alone:
            counts[alone, row.verdict] = counts.get((alone, row.verdict), 0) + 1
        else:
            yield row
    for (start, verdict), count in counts.items():
        yield Row(f"{start}... ({count} figures)", None, None, verdict)


def as_json(comparison: Comparison, old: Path, new: Path, threshold: float) -> str:
    rows = [dataclasses.asdict(row) | {"ratio": row.ratio, "bar": row.bar} for row in comparison.rows]
    content = {
        "old": str(old),
        "new": str(new),
        "threshold": threshold,
        "regressed": comparison.regressed,
        "notes": comparison.notes,
        "rows": rows,
    }
    return json.dumps(content, indent=2)


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="[OLD] NEW")
    options.add_argument(
        "--threshold", type=float, default=0.05, help="a share that is no change (default: %(default)s)"
    )
    options.add_argument("--all", action="store_true", help="show what has not moved, too")
    options.add_argument("--json", action="store_true", help="for programs")
    given = options.parse_args(arguments)
    if len(given.records) > 2:
        options.error(f"one or two records can be compared, and {len(given.records)} were given")
    if not 0 <= given.threshold < 1:
        options.error(
            f"--threshold is {given.threshold:g}; expected a share of at least 0 and below 1 (0.05)"
        )
    try:
        new_path = given.records[-1]
        new = read(new_path)
        old_path = given.records[0] if len(given.records) == 2 else kept_record(new)
        comparison = compare(read(old_path), new, given.threshold)
    except CannotCompare as error:
        print(error, file=sys.stderr)
        return 2
    if given.json:
        print(as_json(comparison, old_path, new_path, given.threshold))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        show(comparison, console, f"{new['script']}: {new_path} against {old_path}", given.all)
    return 1 if comparison.regressed else 0


if __name__ == "__main__":
    sys.exit(main())
