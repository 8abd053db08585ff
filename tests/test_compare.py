"""A result file held against a kept one: what moved, what a program is told, and what cannot be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import compare
from compare import Figure


def record(**more: Any) -> dict[str, Any]:
    content = {
        "script": "speed",
        "figures": {
            "seconds": [1.0, 1.1, 0.9],
            "access": {"median": 5.0, "low": 4.0, "high": 6.0, "n": 9},
            "plan": {"groups": 7, "deep": {"bytes": 1000}},
            "rounds": [{"load": 1.0, "state": "ok"}, {"load": 3.0, "state": "ok"}],
            "gradients": "equal to the bit",
            "once": [8.0],
            "nothing": None,
        },
        "bars": [
            {"name": "time / limit", "value": 1.0, "at_most": 1.05, "at_least": None, "reached": True},
            {"name": "rate", "value": 0.9, "at_most": None, "at_least": 0.85, "reached": True},
            {"name": "said only", "value": 2.0, "at_most": None, "at_least": None, "reached": True},
        ],
        "command": "python speed.py",
        "machine": {"processor": "A", "cores": 2},
        "versions": {"torch": "2.13.0"},
    }
    return content | more


def with_bar(name: str, value: float, reached: bool) -> dict[str, Any]:
    content = record()
    for bar in content["bars"]:
        if bar["name"] == name:
            bar.update(value=value, reached=reached)
    return content


def verdicts(old: dict[str, Any], new: dict[str, Any], threshold: float = 0.05) -> dict[str, str]:
    return {row.name: row.verdict for row in compare.compare(old, new, threshold).rows}


def written(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_record_beside_itself() -> None:
    found = compare.compare(record(), record(), 0.0)
    assert {row.verdict for row in found.rows} == {compare.SAME}
    assert found.notes == [] and found.regressed == []
    assert all(row.ratio in (1.0, None) for row in found.rows)


def test_figures_are_flat() -> None:
    found = compare.figures_of(record())
    assert found["plan / deep / bytes"] == Figure(1000.0)
    assert found["access"] == Figure(5.0, 4.0, 6.0)
    assert found["seconds"] == Figure(1.0, 0.9, 1.1)
    assert found["once"] == Figure(8.0)
    assert found["rounds / load"] == Figure(2.0, 1.0, 3.0)
    assert found["rounds / state"] == Figure("ok")
    assert not any("nothing" in name or name.endswith(" / n") for name in found)
    assert found["rate"].more_is_better and found["time / limit"].more_is_better is False
    assert found["said only"].bar and found["said only"].more_is_better is None


def test_records_within_a_record() -> None:
    suite = {"script": "suite", "bars": [], "figures": {"speed": {"record": record(), "output": "1 2 3"}}}
    found = compare.figures_of(suite)
    assert found["speed / time / limit"].bar and found["speed / plan / groups"] == Figure(7.0)
    assert not any("machine" in name or "output" in name or "cores" in name for name in found)


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (Figure(100.0), Figure(104.0), compare.SAME),
        (Figure(100.0), Figure(106.0), compare.UP),
        (Figure(100.0), Figure(94.0), compare.DOWN),
        (Figure(-100.0), Figure(-94.0), compare.UP),
        (Figure(0.0), Figure(0.0), compare.SAME),
        (Figure(0.0), Figure(1.0), compare.UP),
        (Figure(100.0, 90.0, 115.0), Figure(120.0, 110.0, 130.0), compare.SPREAD),
        (Figure(100.0, 99.0, 101.0), Figure(120.0, 110.0, 130.0), compare.UP),
        (Figure(100.0, 99.0, 101.0), Figure(104.0, 103.0, 105.0), compare.SAME),
        (Figure(100.0, 90.0, 130.0), Figure(120.0), compare.UP),  # one spread is none
        (Figure("ok"), Figure("ok"), compare.SAME),
        (Figure("ok"), Figure("failed"), compare.CHANGED),
        (Figure(1.0), Figure("failed"), compare.CHANGED),
        (None, Figure(1.0), compare.NEW),
        (Figure(1.0), None, compare.GONE),
    ],
)
def test_verdicts(old: Figure | None, new: Figure | None, verdict: str) -> None:
    assert compare.judge(old, new, 0.05) == verdict


@pytest.mark.parametrize(
    ("name", "value", "reached", "verdict"),
    [
        ("time / limit", 1.2, False, compare.MISSED),
        ("time / limit", 1.06, False, compare.MISSED),  # within nothing: a bar is a bar
        ("time / limit", 0.5, True, compare.BETTER),
        ("rate", 0.7, False, compare.MISSED),
        ("rate", 1.8, True, compare.BETTER),
        ("rate", 0.851, True, compare.WORSE),
        ("said only", 3.0, True, compare.UP),
    ],
)
def test_bars(name: str, value: float, reached: bool, verdict: str) -> None:
    new = with_bar(name, value, reached)
    assert verdicts(record(), new)[name] == verdict
    back = {compare.MISSED: compare.REACHED, compare.BETTER: compare.WORSE, compare.WORSE: compare.BETTER}
    assert verdicts(new, record())[name] == back.get(verdict, compare.DOWN)


def test_the_threshold_is_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.json", record())
    new = written(tmp_path / "new.json", with_bar("said only", 2.4, True))
    compare.main([old, new, "--json"])
    assert {"said only": "up"}.items() <= _verdicts(capsys).items()
    compare.main([old, new, "--json", "--threshold", "0.3"])
    assert {"said only": "same"}.items() <= _verdicts(capsys).items()


def _verdicts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_status_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(tmp_path / "old.json", record())
    missed = with_bar("rate", 0.5, False) | {"machine": {"processor": "B", "cores": 2}, "complete": False}
    missed["figures"] = {**missed["figures"], "plan": {"groups": 14, "deep": {"bytes": 1000}}}
    new = written(tmp_path / "new.json", missed)
    assert compare.main([old, new]) == 1
    said = capsys.readouterr().out
    assert "MISSED NOW" in said and "missed now: rate" in said
    assert "plan / groups" in said and "2.000" in said
    assert "machine, processor: A, now B" in said and "cut off" in said and "cores" not in said
    assert "plan / deep / bytes" not in said and "figures are the same" in said
    compare.main([old, new, "--all"])
    assert "plan / deep / bytes" in capsys.readouterr().out
    assert compare.main([new, old]) == 0
    assert "reached now" in capsys.readouterr().out
    assert compare.main([old, old]) == 0


def test_a_contender_that_is_gone_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = record(figures={"a": {"ours": {"x": 1, "y": 2}, "theirs": {"x": 3, "y": 4}}})
    ours = record(figures={"a": {"ours": {"x": 1, "y": 2}}})
    assert compare.main([written(tmp_path / "o", both), written(tmp_path / "n", ours)]) == 0
    said = capsys.readouterr().out
    assert "a / theirs / ... (2 figures)" in said and "theirs / x" not in said


def test_the_old_record_is_the_kept_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    new = written(tmp_path / "mine.json", with_bar("rate", 0.1, False))
    assert compare.main([new]) == 2
    assert "no record of 'speed' is kept" in capsys.readouterr().err
    written(tmp_path / "speed.json", record())
    assert compare.main([new]) == 1


@pytest.mark.parametrize("kept", sorted(compare.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_records_can_be_compared(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(kept), str(kept), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows and {row["verdict"] for row in rows} == {"same"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1, 2]", "is not a benchmark's record"),
        ({"script": "speed", "figures": {}}, "'script', 'figures' and 'bars'"),
        (record(script="other"), "of 'other' and the new one of 'speed'"),
        (None, "cannot be read: No such file"),
    ],
    ids=["not JSON", "a list", "no bars", "another script", "no file"],
)
def test_what_cannot_be_compared(
    content: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", written(tmp_path / "new.json", record())
    if content is not None:
        written(old, content)
    assert compare.main([str(old), new]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"], ["a", "--threshold", "7"]])
def test_arguments_that_cannot_be_used(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        compare.main(arguments)
    assert raised.value.code == 2 and "error" in capsys.readouterr().err


def test_records_with_gaps_and_figures_that_are_no_numbers(tmp_path: Path) -> None:
    """As an interrupted script may leave them."""
    strange = record(
        bars=[{"name": "a", "value": float("nan"), "reached": False}, {"name": "b"}, "c", {"value": 1}],
        figures={"mixed": [1, "x"], "none": [], "infinite": float("inf"), "state": "under way"},
        machine=None,
        versions="?",
    )
    old = written(tmp_path / "old.json", strange)
    assert compare.main([old, old, "--all"]) == 0
