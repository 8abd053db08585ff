"""Fills README and pages in docs with the figures of benchmarks/results, and draws README's chart.

    python benchmarks/figures.py            # after a record was replaced; `make lock` runs it, too
    python benchmarks/figures.py --check    # status 1 if a page, or the chart, differs from the records

Two things in a page are filled in:

- A comment such as `<!-- measured: 263 ns = access "native, copy" -->` after a paragraph, a list or a table
  names the figures in it, in order: each as the text has it, its record, and its name as in compare.py. The
  number in the text becomes that figure's value, with the same digits and unit. A reader of the page sees
  only the number.
- What is between `<!-- figures: KIND NAME -->` and `<!-- end -->`. `bars NAME` is a table of a record's
  bars, `run NAME` tells how and where the record was made, and `peers ram` and `peers file` are the tables
  of peers.json for weights in RAM and in a file. `versions EXTRA` is a table of the locked versions of an
  extra.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart
import compare
import lock

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_DOCS = ROOT / "docs"
#: Pages on which every figure is named in a comment, or is in a table that is filled from a record.
PAGES = (
    ROOT / "README.md",
    *(_DOCS / page for page in ("benchmarks.md", "libraries.md", "guides/experts.md")),
)
#: Pages on which some figures may be from records.
OTHER_PAGES = tuple(page for page in sorted(_DOCS.rglob("*.md")) if page not in PAGES)
CHART = ROOT / "docs" / "images" / "time_and_memory_{theme}.svg"

#: A link to a record as a whole.
LINK = re.compile(r"\[[^\]\[]*\]\([./]*benchmarks/results/(?P<record>\w+)\.json\)")
COMMENT = re.compile(r"<!-- measured: .*?-->", re.DOTALL)
_MARK = re.compile(
    r"(?P<number>[\d,]+(?:\.(?P<digits>\d+))?)(?: (?P<unit>[A-Za-z/]+))?"
    r" = (?P<record>\w+) \"(?P<name>[^\"]*)\""
)
_BLOCK = re.compile(
    r"(?P<head><!-- figures: (?P<kind>\w+) (?P<what>\w+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL
)
_UNITS = {
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
    "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30, "MB/s": 1e6, "GB/s": 1e9,
}  # fmt: skip
#: The Python whose versions a table has: that of the continuous integration.
TABLED_PYTHON = "3.11"
#: The labels of the rows of peers.py in the tables.
_PRIMARY = ("ours", "ours, 1/4")


class WrongFigure(Exception):
    """A page asks for a figure that no record has."""


def read(name: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    except OSError:
        raise WrongFigure(f"there is no record {name}.json") from None
    return record


def filled(text: str) -> str:
    """Return the page with the present figures of the records.

    Raises
    ------
    WrongFigure
        It names a record, a figure or a kind of table that does not exist, or a number that its paragraph
        does not have.
    """
    values = {place: mark for mark in marks(text) for place in mark.places}
    for start, end in sorted(values, reverse=True):
        text = text[:start] + values[start, end].value() + text[end:]
    return _BLOCK.sub(_block, text)


@dataclass(frozen=True)
class Mark:
    """A figure of a page, which a comment ascribes to a record."""

    record: str
    name: str
    unit: str
    digits: int
    #: The positions of the number in the page: in the paragraph, and in the comment.
    places: tuple[tuple[int, int], tuple[int, int]]

    def value(self) -> str:
        """Return the number that the record has, in the page's digits and unit."""
        figure = compare.figures_of(read(self.record)).get(self.name)
        if figure is None or isinstance(figure.value, str):
            raise WrongFigure(f"{self.record}.json has no number '{self.name}'")
        # A bar may be given in a unit of its own, which its name ends in or begins with.
        own = re.search(rf"(?:^|[,:+] ){re.escape(self.unit)}\b", self.name)
        return f"{figure.value / (1.0 if own else _UNITS.get(self.unit, 1.0)):,.{self.digits}f}"


def marks(text: str) -> list[Mark]:
    """Return the figures that the comments of a page name, in order.

    Raises
    ------
    WrongFigure
        A comment names a number that its paragraph does not have, or has in another place too.
    """
    found = []
    for comment in COMMENT.finditer(text):
        before = text[: comment.start()].rstrip()
        begin = max(before.rfind("\n\n"), before.rfind("-->"), 0)
        named = list(_MARK.finditer(text, comment.start(), comment.end()))
        if len(named) != comment[0].count('"') / 2 or not named:
            raise WrongFigure(f"cannot read {comment[0]}")
        places = {shown: _places(shown, before, begin) for shown in {_shown_as(mark) for mark in named}}
        for shown, where in places.items():
            if len(where) != (times := sum(_shown_as(mark) == shown for mark in named)):
                raise WrongFigure(f"'{shown}' is there {len(where)} times, not {times}, before {comment[0]}")
        for mark in named:
            there = (places[_shown_as(mark)].pop(0), mark.span("number"))
            digits = len(mark["digits"] or "")
            found.append(Mark(mark["record"], mark["name"], mark["unit"] or "", digits, there))
    return found


def _shown_as(mark: re.Match[str]) -> str:
    return f"{mark['number']} {mark['unit'] or ''}".strip()


def _places(shown: str, text: str, begin: int) -> list[tuple[int, int]]:
    """Return where a paragraph has a number: the positions of its digits, without the unit."""
    number, _, unit = shown.partition(" ")
    followed = rf"(?=\s+{re.escape(unit)}\b)" if unit else r"(?!\d|[.,]\d)"
    pattern = re.compile(rf"(?<![\w.,]){re.escape(number)}{followed}")
    return [place.span() for place in pattern.finditer(text, begin)]


def _block(found: re.Match[str]) -> str:
    kinds = {"bars": _bars, "peers": _peers, "run": _run, "versions": _versions}
    if found["kind"] not in kinds:
        raise WrongFigure(f"there is no table of the kind '{found['kind']}'; there are {', '.join(kinds)}")
    return found["head"] + "\n".join(kinds[found["kind"]](found["what"])) + "\n" + found["tail"]


def _bars(name: str) -> list[str]:
    lines = ["| figure | bound | measured |", "| --- | --- | ---: |"]
    for bar in read(name)["bars"]:
        bounds = [f">= {bar['at_least']:g}"] if bar["at_least"] is not None else []
        bounds += [f"<= {bar['at_most']:g}"] if bar["at_most"] is not None else []
        shown = _shown(bar["value"])
        missed = "" if bar["reached"] else ", missed"
        lines.append(f"| {bar['name'].strip()} | {' and '.join(bounds)} | {shown}{missed} |")
    return lines


def _shown(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _run(name: str) -> list[str]:
    record = read(name)
    machine, versions = record["machine"], record["versions"]
    named = Counter(machine["accelerators"]).items()
    gpus = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in named) or "no GPU"
    return [
        f"[{name}.json](../benchmarks/results/{name}.json): `{record['command']}`, {record['date'][:10]}, "
        f"{machine['cores']} cores of {machine['processor']}, {gpus}, {machine['system'].split('-')[0]}, "
        f"Python {versions['python']}, torch {versions['torch']}."
    ]


def _versions(extra: str) -> list[str]:
    """Return a table of torch, in the Makefile's default version, and of an extra's libraries, as locked."""
    locked = lock.locked(TABLED_PYTHON)
    names = sorted(requirement.name for requirement in lock.extra(extra, TABLED_PYTHON))
    rows = [("torch", lock.default_torch()), *((name, locked[name]) for name in names)]
    return ["| library | version |", "| --- | --- |", *(f"| {name} | {version} |" for name, version in rows)]


def _peers(placement: str) -> list[str]:
    sections = {
        workload: places[placement]
        for workload, places in read("peers")["figures"].items()
        if placement in places
    }
    lines = [f"| time / ours | {' | '.join(sections)} |", f"| --- |{' ---: |' * len(sections)}"]
    calls = []
    for section in sections.values():
        seconds = section["rows"][section["ours"]]["seconds"]["median"]
        calls.append(f"{seconds * 1e3:.{max(0, 2 - len(str(int(seconds * 1e3))) + 1)}f} ms")
    lines.append(f"| **ours, a call** | {' | '.join(calls)} |")
    for name in dict.fromkeys(name for section in sections.values() for name in section["rows"]):
        rows = [section["rows"].get(name, {}) for section in sections.values()]
        if name not in _PRIMARY and any("seconds" in row for row in rows):
            lines.append(f"| {name} | {' | '.join(map(_cell, rows))} |")
    return lines


def _cell(row: dict[str, Any]) -> str:
    if "seconds" not in row:
        return "-"
    return f"{row['ratio_to_ours']:.2f}{'' if row['equal'] else ' †'}{' ‡' if row['stays_in_ram'] else ''}"


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--check", action="store_true", help="write nothing; status 1 if something differs")
    given = options.parse_args(arguments)
    record = read("peers")
    wanted = {Path(str(CHART).format(theme=theme)): chart.draw(record, theme) for theme in chart.THEMES}
    wanted |= {page: filled(page.read_text()) for page in (*PAGES, *OTHER_PAGES)}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'differs from the records' if given.check else 'is written'}")
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
