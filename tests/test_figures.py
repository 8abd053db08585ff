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

README, BENCHMARKS, LIMITS, *_ = figures.PAGES
#: Times, ratios and memory in prose: each is a figure, unless it is a setting.
_FIGURE = re.compile(r"\d+(?:\.\d+)? (?:ns|us|ms|s|seconds|MiB|GB/s|%|times)(?!\w)|\b[01]\.\d\d\b")
_SETTINGS = {"384 MiB", "32 MiB", "8 MiB", "1.05"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def test_pages_and_chart_have_the_figures_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    status = figures.main(["--check"])
    assert status == 0, f"{capsys.readouterr().out}; `python benchmarks/figures.py` writes them"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.stem)
def test_no_figure_is_without_its_record(page: Path) -> None:
    """What is neither a link to a record, nor filled in as a table, nor code."""
    text = figures._BLOCK.sub("", _FENCED.sub("", page.read_text()))
    linked = figures.LINK.findall(text)
    assert len([name for _, _, name in linked if name]) >= 2 or page.name == "libraries.md", "it has versions"
    rest = re.sub(r"`[^`]*`", "", figures.LINK.sub("", text))
    assert [found for found in _FIGURE.findall(rest) if found not in _SETTINGS] == []


@pytest.mark.parametrize("page", [*figures.PAGES, *figures.OTHER_PAGES], ids=lambda page: page.stem)
def test_no_record_is_cited_without_a_link_to_the_figure(page: Path) -> None:
    assert re.findall(r"results/\w+\.json", figures.LINK.sub("", page.read_text())) == []


def test_readme_is_short_and_says_what_was_measured_where() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first = "".join(lines[:35])  # a screen, of which the lines to paste come first
    assert (
        first.index("StreamConfig")
        < first.index("gpu_suite.json")
        < first.index("All other figures are of a CPU")
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
