"""Every benchmark starts: at sizes whose figures mean nothing, and with records that are complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_scripts import run_script

import common  # isort: skip
import shapes  # isort: skip

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "script",
    [
        "access",
        "architectures",
        "bandwidth",
        "convert",
        "disk",
        "experts",
        "gpu_stack",
        "host_time",
        "install",
        "load",
        "plan",
        "silent_writes",
        "stream",
        "train",
        "virtual_clock",
    ],
)
def test_tiny_run_writes_its_record(script: str, tmp_path: Path) -> None:
    if script == "experts":
        pytest.importorskip("transformers", reason="transformers is not installed")
    on_disk = ("convert", "disk", "load", "plan", "stream", "train")
    more = ["--folder", str(tmp_path)] if script in on_disk else []
    more += ["--only", "dynswap,classic hook"] if script == "train" else []
    more += ["--only", "first,shared"] if script == "disk" else []
    more += ["--device", "cpu"] if script in ("access", "bandwidth", "install", "gpu_stack") else []
    done = run_script(script, "--tiny", "--output", str(tmp_path / "record.json"), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    if script in ("host_time", "plan", "virtual_clock") and "left out" in done.stdout:
        pytest.skip("it needs the extension, which is not built, or the pretend device: " + done.stdout)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["bars"] and record["figures"] and record["complete"]
    assert record["machine"]["processor"] and record["versions"]["torch"] and record["command"]
    assert "commit" in record and record["dynswap_ext"]["provider"] in ("native", "python")


@pytest.mark.parametrize(
    ("layers", "published"),
    [
        (shapes.llama_3_8b(16), 8_030_261_248),
        (shapes.flux_1(1024), 11_901_408_320),
        (shapes.sdxl_unet(128), 2_567_463_684),
    ],
    ids=["Llama-3-8B", "FLUX.1", "SDXL"],
)
def test_shapes_have_the_published_number_of_parameters(layers: list[shapes.Layer], published: int) -> None:
    assert sum(layer.elements for layer in layers) == published
    units = [layer.unit for layer in layers]
    assert units == sorted(units)


class TestBar:
    def test_bounds(self) -> None:
        assert common.Bar("a", 1.0, at_most=1.0).reached
        assert not common.Bar("a", 1.1, at_most=1.0).reached
        assert common.Bar("a", 1.0, at_least=1.0).reached
        assert not common.Bar("a", 0.9, at_least=1.0).reached
        assert "MISSED" in str(common.Bar("a", 0.9, at_least=1.0))
        assert common.Bar("a", 0.9).reached and "MISSED" not in str(common.Bar("a", 0.9))

    def test_a_missed_bar_is_the_exit_status(self, tmp_path: Path) -> None:
        record = common.Record("x", tiny=False)
        record.bar("a", 2.0, at_most=1.0)
        assert record.finish(tmp_path / "x.json") == 1
        assert json.loads((tmp_path / "x.json").read_text())["bars"][0]["reached"] is False


def test_time_call_leaves_warm_up_out() -> None:
    calls: list[int] = []
    sample = common.time_call(lambda: calls.append(1), repeats=3, warm_up=2)
    assert sample.n == 3 and len(calls) == 5
    assert sample.low <= sample.median <= sample.high
