"""`make figures` makes the records again that README and docs cite, and says which are of too old a tree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import benchmark_scripts  # noqa: F401  (the folder that the next two are in)

import figures  # isort: skip
import renew  # isort: skip

INSTALL = renew.Run("install", ("--tiny", "--device", "cpu"))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the records, to be changed."""
    shutil.copytree(figures.RESULTS, tmp_path / "results")
    for module in (figures, renew):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_each_record_that_is_cited_is_made_somewhere() -> None:
    cited = {age.record for age in renew.ages()}
    assert cited == set(renew.RUNS) | set(renew.ELSEWHERE)


def test_no_record_that_is_cited_is_too_old() -> None:
    assert [str(age) for age in renew.ages() if age.too_old] == []


def test_a_record_of_an_old_tree_is_too_old(
    records: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if renew.age("plan").commits is None:
        pytest.skip("there is no history here")
    root = renew._git("rev-list", "--max-parents=0", "HEAD")
    assert root is not None
    change(records / "plan.json", commit=root.split()[0])
    age = renew.age("plan")
    if age.commits == 0:
        pytest.skip("the history here is of one commit")
    monkeypatch.setattr(renew, "MOST_COMMITS", age.commits - 1 if age.commits else 0)
    assert renew.main(["--age"]) == 1
    assert (
        f"plan                   {age.commits} commits back; too old: make figures" in capsys.readouterr().out
    )
    # What this machine cannot make is as old as it is.
    change(records / "gpu_suite.json", commit=root.split()[0])
    assert not renew.age("gpu_suite").too_old


def test_a_commit_that_is_gone_is_as_old_as_its_record(records: Path) -> None:
    if renew.age("plan").commits is None:
        pytest.skip("there is no history here")
    change(records / "plan.json", commit="0" * 40, date="2037-01-01T00:00:00+00:00")
    assert renew.age("plan").commits == 0
    change(records / "plan.json", commit="0" * 40, date="2000-01-01T00:00:00+00:00")
    assert renew.age("plan").commits == int(renew._git("rev-list", "--count", "HEAD") or 0)


def test_a_record_of_an_earlier_release_is_too_old(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renew, "ROOT", tmp_path)  # where there is no history, either
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [0.3.0]\n\n## [0.2.0]\n\n## [0.1.0]\n")
    for version, too_old in (("0.3.0", False), ("0.2.0", False), ("0.1.0", True), ("0.4.0", False)):
        record = json.loads((records / "plan.json").read_text())
        change(records / "plan.json", versions=record["versions"] | {"dynswap_ext": version})
        assert renew.age("plan").too_old == too_old, version


def test_a_whole_record_takes_the_place_of_the_old_one(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(renew.RUNS, "install", INSTALL)
    before = (records / "install.json").read_text()
    assert renew.renew("install")
    record = json.loads((records / "install.json").read_text())
    assert (records / "install.json").read_text() != before and record["complete"]
    assert record["command"].endswith("benchmarks/install.py --tiny --device cpu")  # not where it was put
    # And what ended early leaves it.
    before = (records / "install.json").read_text()
    monkeypatch.setitem(renew.RUNS, "install", renew.Run("install", ("--no-such-option",)))
    assert not renew.renew("install")
    assert (records / "install.json").read_text() == before
    assert "it ended with status 2: see build/figures/install.log" in capsys.readouterr().out


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        renew.main(["--only", "speed"])
    assert "there is no record speed; there are peers," in capsys.readouterr().err
    monkeypatch.setattr("os.getloadavg", lambda: (1.7, 0.0, 0.0))
    monkeypatch.setattr(renew, "MOST_WAIT", 0.0)
    with pytest.raises(SystemExit):
        renew.main(["--only", "plan"])
    assert "busy (its load average is 1.7)" in capsys.readouterr().err


def test_the_load_of_a_build_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([1.7, 0.9, 0.4])
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert renew.wait_until_idle() == ""
    assert next(loads, None) is None
