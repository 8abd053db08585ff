"""README, the pages in docs and the chart have the figures of the records, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import benchmark_scripts  # noqa: F401  (the folder that the next three are in)

import chart  # isort: skip
import figures  # isort: skip
from records import as_json, summary  # isort: skip

README, BENCHMARKS, *_ = figures.PAGES
#: Times, ratios and memory in prose: each is a measured figure, unless it is a setting.
_FIGURE = re.compile(r"\d+(?:\.\d+)? (?:ns|us|ms|s|seconds|MiB|GB/s|%|times)(?!\w)|\b[01]\.\d\d\b")
_SETTINGS = {"384 MiB", "32 MiB", "8 MiB", "1.05"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_pages_and_chart_have_the_figures_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    status = figures.main(["--check"])
    assert status == 0, f"{capsys.readouterr().out}; `python benchmarks/figures.py` writes them"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.stem)
def test_no_figure_is_without_its_record(page: Path) -> None:
    """Every figure of a page is named by a comment, in a table that is filled in, or in code."""
    text = page.read_text()
    marks = figures.marks(text)
    assert len(marks) >= 2 or page.name == "libraries.md", "only that page has none"
    spans = [mark.places[0] for mark in marks]
    for start, end in sorted(spans, reverse=True):
        text = text[:start] + text[end:]
    text = figures.COMMENT.sub("", figures._BLOCK.sub("", _FENCED.sub("", text)))
    rest = re.sub(r"`[^`]*`", "", figures.LINK.sub("", text))
    assert [found for found in _FIGURE.findall(rest) if found not in _SETTINGS] == []


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ('It takes 7 ms.\n<!-- measured: 8 ms = access "native, copy" -->', "'8 ms' is there 0 times, not 1"),
        ('1.5 us or 1.5 us.\n<!-- measured: 1.5 us = access "native, copy" -->', "is there 2 times, not 1"),
        ('It takes 7 ms.\n<!-- measured: 7 ms = access "no such" -->', "access.json has no number 'no such'"),
        (
            'It takes 7 ms.\n<!-- measured: 7 ms = nothing "copy" -->',
            "there is no record nothing.json",
        ),
        ('It takes 7 ms.\n<!-- measured: 7 ms is access "native, copy" -->', "cannot read <!-- measured"),
    ],
)
def test_a_comment_that_names_no_figure_of_its_paragraph_is_refused(page: str, why: str) -> None:
    with pytest.raises(figures.WrongFigure, match=re.escape(why)):
        figures.filled(page)


def test_a_paragraph_and_its_comment_are_filled_together() -> None:
    text = 'A. 9 s.\n\n| 2.5 | 9 ns |\n<!-- measured: {} = access "native, copy" -->\n'
    filled = figures.filled(text.format("9 ns"))
    number = re.search(r"measured: ([\d,]+) ns", filled)
    assert number and number[1] != "9"
    assert filled == text.replace("9 ns", f"{number[1]} ns").format(f"{number[1]} ns")


def test_readme_has_plain_figures_and_one_way_to_their_records() -> None:
    text = README.read_text()
    assert "benchmarks/results" not in text
    assert text.count("](docs/benchmarks.md") == 1


def test_readme_is_short_and_says_what_was_measured_where() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first = "".join(lines[:35])  # one screen, which begins with the lines to paste
    assert (
        first.index("StreamConfig") < first.index("an H200") < first.index("All other figures are of a CPU")
    )


def test_every_record_is_on_the_page() -> None:
    text = BENCHMARKS.read_text()
    assert [path.name for path in figures.RESULTS.glob("*.json") if path.name not in text] == []


def test_readme_names_the_fastest_and_the_slowest_peer() -> None:
    rows = figures.read("peers")["figures"][chart.WORKLOAD]["file"]["rows"]
    times = {
        name: row["ratio_to_ours"]
        for name, row in rows.items()
        if row.get("kind") == "peer" and row["equal"] and not row["stays_in_ram"]
    }
    for name in (min(times, key=times.__getitem__), max(times, key=times.__getitem__)):
        assert f"{chart.WORKLOAD} / file / rows / {name} / ratio_to_ours" in README.read_text()


def test_every_peer_is_in_the_chart() -> None:
    rows = figures.read("peers")["figures"][chart.WORKLOAD]["file"]["rows"]
    left_out = {name for name, row in rows.items() if row.get("kind") != "ours" and "seconds" in row}
    assert left_out - set(chart.LABELS) == set()
    picture = chart.draw(figures.read("peers"), "light")
    for name in chart.LABELS:
        assert f"{chart.LABELS[name]}: {rows[name]['seconds']['median'] * 1e3:.0f} ms" in picture


def test_nothing_is_below_the_limit_of_the_chart() -> None:
    record = figures.read("peers")
    limit = chart.Limit.of(record)
    for name, row in record["figures"][chart.WORKLOAD]["file"]["rows"].items():
        if "seconds" in row:
            assert row["seconds"]["median"] >= 0.95 * limit.at(row["peak_bytes"]), name


@pytest.mark.parametrize("path", sorted(figures.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_records_are_summaries(path: Path) -> None:
    record = json.loads(path.read_text())
    assert summary(record["figures"]) == record["figures"]
    assert record["complete" if "complete" in record else "bars"] and record["machine"]["processor"]
    assert path.read_text() == as_json(record) + "\n"
