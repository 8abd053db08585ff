"""The head-to-head: a row for each baseline, and figures that compare like with like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_scripts import run_script
from head_to_head.job import Row
from head_to_head.table import Section


@pytest.mark.slow
def test_peers_has_a_row_for_each_baseline(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    baselines = "ours;ours, 1/4;classic hook;classic hook, pinned;accelerate cpu_offload;mmgp"
    more = ["--only", "narrow,conditional,unet", "--baselines", baselines, "--device", "cpu"]
    done = run_script("peers", "--tiny", "--output", str(path), "--folder", str(tmp_path), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert set(record["figures"]) == {"narrow", "conditional", "unet"} and record["bars"]
    for workload in ("narrow", "conditional"):
        sections = record["figures"][workload]
        wanted = {"resident", *baselines.split(";")}
        assert set(sections["ram"]["rows"]) == wanted - {"ours, 1/4"}
        assert set(sections["file"]["rows"]) == {"resident", "ours, 1/4", "classic hook"}
        for section in sections.values():
            for name, row in section["rows"].items():
                # Figures, or the reason why there are none.
                assert ("failure" in row) != ("seconds" in row), (workload, name, row)
            hook = section["rows"]["classic hook"]
            assert hook["outputs"] == "bit-equal" and hook["equal"]
            assert hook["seconds"]["median"] > 0 and hook["ratio_to_ours"] > 0
            # A provider that cannot be had here says so; the other one is compared then.
            ours = section["rows"][section["ours"]] if section["ours"] else None
            assert ours is None or ours["outputs"] == "bit-equal"
        assert "accelerator" in sections["ram"]["rows"]["classic hook, pinned"]["failure"]
        assert sections["ram"]["rows"]["mmgp"]["failure"]
    assert not list(tmp_path.glob("peers-*"))  # what was written for the run is gone


def test_peers_leaves_what_was_finished_when_its_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    more = ["--only", "narrow", "--baselines", "ours", "--device", "cpu", "--total", "0"]
    done = run_script("peers", "--tiny", "--output", str(path), "--folder", str(tmp_path), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["figures"]["narrow"]["ram"]["rows"]
    assert all("--total" in row["failure"] for row in rows.values())
    done = run_script("peers", "--tiny", "--baselines", "nobody")
    assert done.returncode == 2 and "nobody" in done.stderr


class TestHeadToHeadSection:
    def section(self, placement: str) -> Section:
        rows = {
            "resident": Row(seconds=[1.0]),
            "ours, 1/4": Row(seconds=[2.0], outputs="bit-equal", disk_bytes=80, moved_bytes=75),
            "classic hook": Row(seconds=[4.0, 5.0, 3.0], outputs="bit-equal", disk_bytes=100),
            "diffusers group offload, leaf": Row(seconds=[0.5], outputs="off by nan", disk_bytes=100),
            "compressed-tensors offload": Row(seconds=[0.6], outputs="bit-equal", disk_bytes=0),
            "mmgp": Row(failure="it runs on CUDA alone"),
        }
        return Section("mlp", "", placement, "cpu", "pass", 100, 40.0, "disk", rows)

    def test_peers_that_are_wrong_or_keep_the_weights_are_not_compared(self) -> None:
        section = self.section("file")
        assert section.ours == "ours, 1/4" and section.best_peer() == "classic hook"
        assert section.stays("compressed-tensors offload") and not section.stays("resident")
        # With the weights in RAM there is nothing to read.
        assert self.section("ram").best_peer() == "compressed-tensors offload"

    def test_limit_is_the_larger_of_compute_and_reading(self) -> None:
        section = self.section("file")
        assert section.limit("ours, 1/4") == 2.0  # what the disk delivered, not what was asked for
        assert section.limit("resident") == section.limit("compressed-tensors offload") == 1.0
        assert section.to_record()["rows"]["classic hook"]["ratio_to_limit"] == 4.0 / 2.5

    def test_joined_rows_keep_every_figure_and_what_differs(self) -> None:
        row = Row(seconds=[1.0], outputs="bit-equal").joined(Row(seconds=[2.0], outputs="off by 1"))
        assert row.seconds == [1.0, 2.0] and row.outputs == "bit-equal, then off by 1"
        assert row.joined(Row(failure="late")).seconds == [1.0, 2.0]
