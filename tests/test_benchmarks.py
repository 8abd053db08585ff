"""Every script of benchmarks/ starts, at sizes whose figures mean nothing, and leaves a complete record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark_scripts import ROOT, run_script

import gpu_suite  # isort: skip
import renew  # isort: skip
import shapes  # isort: skip

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    "script",
    [
        "access",
        "activations",
        "architectures",
        "bandwidth",
        "convert",
        "disk",
        "experts",
        "gpu_stack",
        "host_memory",
        "host_time",
        "install",
        "load",
        "lossless",
        "mesh",
        "next_experts",
        "plan",
        "ranks",
        "silent_writes",
        "stream",
        "train",
        "virtual_clock",
    ],
)
def test_tiny_run_writes_its_record(script: str, tmp_path: Path) -> None:
    if script in ("experts", "next_experts"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    on_disk = (
        "activations",
        "convert",
        "disk",
        "host_memory",
        "load",
        "lossless",
        "plan",
        "ranks",
        "stream",
        "train",
    )
    more = ["--folder", str(tmp_path)] if script in on_disk else []
    more += ["--only", "dynswap,classic hook"] if script == "train" else []
    more += ["--only", "first,shared"] if script == "disk" else []
    more += ["--device", "cpu"] if script in ("access", "bandwidth", "install", "gpu_stack") else []
    done = run_script(script, "--tiny", "--output", str(tmp_path / "record.json"), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    if (
        script in ("activations", "host_time", "lossless", "mesh", "plan", "virtual_clock")
        and "left out" in done.stdout
    ):
        pytest.skip("it needs the extension, which is not built, or the pretend device: " + done.stdout)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["bars"] and record["figures"] and record["complete"]
    assert record["machine"]["processor"] and record["versions"]["torch"] and record["command"]
    assert "commit" in record and record["dynswap_ext"]["provider"] in ("native", "python")


@pytest.mark.slow
def test_peers_has_a_row_for_each_baseline(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    more = ["--only", "narrow", "--baselines", "ours;ours, 1/4;classic hook;mmgp", "--device", "cpu"]
    done = run_script("peers", "--tiny", "--output", str(path), "--folder", str(tmp_path), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(path.read_text())["figures"]["narrow"]
    assert set(sections["ram"]["rows"]) == {"resident", "ours", "classic hook", "mmgp"}
    assert set(sections["file"]["rows"]) == {"resident", "ours, 1/4", "classic hook"}
    for section in sections.values():
        # A row has figures, or the reason why there are none.
        assert all(("failure" in row) != ("seconds" in row) for row in section["rows"].values())
        assert section["rows"]["classic hook"]["outputs"] == "bit-equal"
        assert not section["ours"] or section["rows"][section["ours"]]["outputs"] == "bit-equal"
    assert not list(tmp_path.glob("peers-*"))  # files of the run are removed


@pytest.mark.slow
def test_ratios_are_held_against_the_kept_ones() -> None:
    done = run_script("ratios", "--tiny")
    assert done.returncode == 0, done.stderr
    assert "read in a forward, streamed" in done.stdout and "noise of this run" in done.stdout


def test_a_record_is_compared_with_the_kept_one(tmp_path: Path) -> None:
    record = json.loads((renew.RESULTS / "stream.json").read_text())
    new, bar = tmp_path / "new.json", next(bar for bar in record["bars"] if bar["reached"])
    for reached in (True, False):
        bar["reached"] = reached
        new.write_text(json.dumps(record))
        done = run_script("compare", str(new))
        assert (done.returncode == 0) == reached and ("MISSED NOW" in done.stdout) != reached, done.stderr


def test_the_ages_of_the_records_are_shown() -> None:
    shown = run_script("renew", "--age")
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) == len(renew.ages()), shown.stderr


def test_parts_of_the_gpu_suite_start_and_are_recorded(tmp_path: Path) -> None:
    more = ["--dry-run", "--only", "build,smoke", "--folder", str(tmp_path)]
    done = run_script("gpu_suite", *more, "--output", str(tmp_path / "record.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["complete"] and {part["state"] for part in record["figures"].values()} == {"ok"}
    assert set(record["figures"]) == {"build", "smoke"}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]  # nothing is left behind


def test_on_a_gpu_the_suite_builds_for_it_and_lets_no_test_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    parts = {part.name: part for part in gpu_suite.parts(dry_run=False, folder="/folder")}
    assert parts["build"].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    for name in ("tests", "expandable segments", "contract tests"):
        assert parts[name].environment["DYNSWAP_REQUIRE_CUDA"] == "1"
    commands = [part.commands[0] for part in parts.values()]
    scripts = [word for words in commands for word in words if word.startswith(str(ROOT / "benchmarks"))]
    assert len(scripts) > 5 and all(Path(script).exists() for script in scripts)


@pytest.mark.parametrize(
    ("layers", "published"),
    [
        (shapes.llama_3_8b(16), 8_030_261_248),
        (shapes.llama_3_70b(16), 70_553_706_496),
        (shapes.flux_1(1024), 11_901_408_320),
        (shapes.sdxl_unet(128), 2_567_463_684),
    ],
    ids=["Llama-3-8B", "Llama-3-70B", "FLUX.1", "SDXL"],
)
def test_shapes_have_the_published_number_of_parameters(layers: list[shapes.Layer], published: int) -> None:
    assert sum(layer.elements for layer in layers) == published
    units = [layer.unit for layer in layers]
    assert units == sorted(units)
