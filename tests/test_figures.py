"""README, the pages in docs and the chart have the figures of the records, and no others."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import benchmark_scripts  # noqa: F401  (the folder that the next two are in)

import chart  # isort: skip
import figures  # isort: skip

README, BENCHMARKS, LIMITS, *_ = figures.PAGES
#: Times, ratios and memory in prose: each is a figure, unless it is a setting.
_FIGURE = re.compile(r"\d+(?:\.\d+)? (?:ns|us|ms|s|seconds|MiB|GB/s|%|times)(?!\w)|\b[01]\.\d\d\b")
_SETTINGS = {"384 MiB", "32 MiB", "8 MiB", "1.05"}
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the records, to be changed."""
    shutil.copytree(figures.RESULTS, tmp_path / "results")
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def known(records: Path) -> Path:
    """A copy of a record of known figures."""
    path = records / "stream.json"
    for keys, value in (
        (("figures", "read-bound", "peak_bytes", "median"), 404_152_320),
        (("figures", "read-bound", "seconds", "median"), 0.721102),
        (("bars", 1, "value"), 0.818157),
        (("bars", 3, "value"), 792.37),
        (("bars", 3, "reached"), False),
    ):
        change(path, *keys, value=value)
    return path


def change(path: Path, *keys: str | int, value: Any) -> None:
    record = json.loads(path.read_text())
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(record))


def test_pages_and_chart_have_the_figures_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    status = figures.main(["--check"])
    assert status == 0, f"{capsys.readouterr().out}; `python benchmarks/figures.py` writes them"


def test_a_figure_that_changed_is_noticed(records: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0
    change(records / "stream.json", "bars", 1, "value", value=0.9)
    assert figures.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "README.md differs" in said and "docs/benchmarks.md differs" in said and ".svg" not in said
    change(
        records / "peers.json",
        "figures",
        "diffusion",
        "file",
        "rows",
        "ours, 1/4",
        "seconds",
        "median",
        value=0.1,
    )
    assert figures.main(["--check"]) == 1
    assert "time_and_memory_dark.svg differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "value", "found"),
    [
        (("bars", 3, "value"), 512.25, "| peak RSS over the start of the run, MiB | <= 448 | 512, missed |"),
        (("bars", 3, "reached"), True, "| peak RSS over the start of the run, MiB | <= 448 | 792 |"),
        (("bars", 2, "value"), False, "| compute-bound: outputs equal to the bit | >= 1 | no |"),
        (
            ("figures", "read-bound", "peak_bytes", "median"),
            400 << 20,
            "[400 MiB](../benchmarks/results/stream.json",
        ),
        (("machine", "cores"), 64, "64 cores of"),
        (("machine", "accelerators"), ["H200"], ", H200, Linux"),
    ],
)
def test_a_page_is_filled_in_again(known: Path, keys: tuple[Any, ...], value: Any, found: str) -> None:
    before = figures.filled(BENCHMARKS.read_text())
    change(known, *keys, value=value)
    after = figures.filled(before)
    assert found not in before and found in after
    assert figures.filled(after) == after


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("1.55", "0.82"),
        ("**1**", "**1**"),
        ("some 3.123 here, 7", "some 0.818 here, 7"),
    ],
)
def test_the_text_of_a_link_says_how_a_figure_is_shown(known: Path, text: str, kept: str) -> None:
    at = '(benchmarks/results/stream.json "compute-bound: time of a pass / resident")'
    assert figures.filled(f"[{text}]{at}") == f"[{kept}]{at}"


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("read-bound / peak_bytes", "1 MiB", "385 MiB"),
        ("read-bound / peak_bytes", "1.0 MB", "404.2 MB"),
        ("read-bound / peak_bytes", "1", "404,152,320"),
        ("peak RSS over the start of the run, MiB", "1 MiB", "792 MiB"),  # in its own unit
        ("read-bound / seconds", "1 ms", "721 ms"),
    ],
)
def test_units(known: Path, name: str, text: str, kept: str) -> None:
    at = f'(../benchmarks/results/stream.json "{name}")'
    assert figures.filled(f"[{text}]{at}") == f"[{kept}]{at}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[1](benchmarks/results/stream.json "no such figure")', "no such number"),
        ('[none](benchmarks/results/stream.json "read-bound / peak_bytes")', "no such number"),
        ('[1](benchmarks/results/stream.json "read-bound / provider")', "no such number"),
        ("[1](benchmarks/results/nothing.json)", "no record nothing.json"),
        ("<!-- figures: bars nothing -->\n<!-- end -->", "no record nothing.json"),
        ("<!-- figures: rows stream -->\n<!-- end -->", "no table of the kind 'rows'"),
    ],
)
def test_figures_that_there_are_not(text: str, said: str) -> None:
    with pytest.raises(figures.WrongFigure, match=said):
        figures.filled(text)


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


def test_the_check_for_figures_without_a_record_can_fail() -> None:
    found = _FIGURE.findall("in 25 ms, 0.82 of it, 155 MiB, 2.0 GB/s, 3 times; Python 3.10, torch 2.11")
    assert found == ["25 ms", "0.82", "155 MiB", "2.0 GB/s", "3 times"]


def test_readme_is_short_and_says_what_was_measured_where() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    first = "".join(lines[:10])
    assert "gpu_suite.json" in first and "All other figures are of a CPU" in first


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


class TestChart:
    def test_every_peer_is_in_it(self) -> None:
        rows = figures.read("peers")["figures"][chart.WORKLOAD]["file"]["rows"]
        left_out = {name for name, row in rows.items() if row.get("kind") != "ours" and "seconds" in row}
        assert left_out - set(chart.LABELS) == set()
        picture = chart.draw(figures.read("peers"), "light")
        for name in chart.LABELS:
            assert f"{chart.LABELS[name]}: {rows[name]['seconds']['median'] * 1e3:.0f} ms" in picture

    def test_nothing_is_below_the_limit(self) -> None:
        record = figures.read("peers")
        limit = chart.Limit.of(record)
        for name, row in record["figures"][chart.WORKLOAD]["file"]["rows"].items():
            if "seconds" in row:
                assert row["seconds"]["median"] >= 0.95 * limit.at(row["peak_bytes"]), name

    def test_limit(self) -> None:
        limit = chart.Limit(compute=1.0, weight_bytes=100, other_bytes=10, bytes_per_second=20)
        assert limit.at(10) == 5.0 and limit.at(60) == 2.5 and limit.at(110) == limit.at(500) == 1.0
        assert limit.knee == 90 and limit.at(limit.knee) == 1.0
        assert chart.Limit(9.0, 100, 10, 20).knee == 10  # compute is the limit from the start

    @pytest.mark.parametrize("theme", chart.THEMES)
    def test_it_is_svg_that_can_be_read(self, theme: str) -> None:
        root = ET.fromstring(chart.draw(figures.read("peers"), theme))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(text.attrib["x"]) <= width and 0 <= float(text.attrib["y"]) <= height
        colours = chart.THEMES[theme]
        for name in ("text", "faint", "ours", "peer"):
            assert contrast(colours[name], colours["page"]) >= 4.5, name


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
