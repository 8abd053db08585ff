"""``dynswap plan``: its output, its pictures and its errors."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import skip_or_fail
from dynswap_ext import _provider, cli, planning
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.units import parse_bandwidth, parse_seconds, parse_throughput, show_rate
from dynswap_ext.checkpoint import convert, summary
from dynswap_ext.errors import ConfigError


@pytest.fixture(autouse=True)
def _native() -> None:
    if reason := _provider.native_unavailable(torch.device("cpu")):
        skip_or_fail(reason, cuda=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({f"layers.{i}.weight": torch.ones(256, 256) for i in range(20)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *arguments, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_the_table(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    given = ["--bandwidth", "1GB/s", "--compute", "5ms", "--budget", "2MiB", "--share", "1/2"]
    assert cli.main(["plan", str(path), *given]) == 0
    printed = capsys.readouterr().out
    assert (
        "20 weights" in " ".join(printed.split())
        and "1 GB/s (given)" in printed
        and "5ms a pass (given)" in printed
    )
    assert "smallest" in printed and "all" in printed and "…" not in printed
    assert "2 MiB: " in printed and "2.5 MiB: " in printed and "copies" in printed
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_coded_masters_are_said_to_move_fewer_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({f"{i}.weight": torch.randn(256, 256).bfloat16() for i in range(4)}, tmp_path / "w.safetensors")
    convert(tmp_path / "w.safetensors", tmp_path / "coded.safetensors", lossless=True)
    stored = format_bytes(summary(tmp_path / "coded.safetensors").total_bytes)
    for options, why in (([], "coded"), (["--dtype", "fp32"], "coded and of another dtype")):
        assert cli.main(["plan", str(tmp_path / "coded.safetensors"), *options]) == 0
        printed = " ".join(
            capsys.readouterr().out.split()
        )  # lines are folded where the path's length asks for it
        assert f"{stored} moved, as the masters are {why} " in printed


def test_what_is_assumed_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(path), "--budget", "1MiB"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "26 GB/s (assumed: a PCIe 4 card)" in printed
    assert "1 row a pass (assumed: one token" in printed and "120 TFLOPS (assumed" in printed
    assert "computes for as long as its copies take" in printed


def test_a_budget_that_is_too_small_is_the_exit_status(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(path), "--budget", "1KiB", "--budget", "2MiB"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 KiB is too small" in printed and f"{256 * 256 * 4} bytes" in printed and "2 MiB: " in printed


def test_the_minimum_has_a_row(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(path), "--budget", "minimum"]) == 0
    printed = capsys.readouterr().out
    assert " minimum " in printed
    found = plan_json(capsys, str(path), "--budget", "MINIMUM")
    assert found["asked"] == [found["minimum_budget"]] and found["minimum_budget"] >= found["smallest_budget"]


def test_a_larger_budget_that_is_slower_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [4, 2, 2, 8, 4, 1, 8, 1, 2, 4, 1, 4, 8, 2, 4, 4]
    save_file(
        {f"layers.{i}.weight": torch.ones(64 * size, 256) for i, size in enumerate(sizes)},
        tmp_path / "m.safetensors",
    )
    given = [
        str(tmp_path / "m.safetensors"),
        "--bandwidth",
        "2GB/s",
        "--compute",
        "5ms",
        "--budget",
        "832KiB",
    ]

    def of_832_kib(*more: str) -> Any:
        return next(row for row in plan_json(capsys, *given, *more)["budgets"] if row["budget"] == 832 << 10)

    alone, beside = of_832_kib(), of_832_kib("--budget", "768KiB")
    assert alone == beside
    assert cli.main(["plan", *given, "--budget", "768KiB"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Slower than 768 KiB, which is enough: 832 KiB." in printed
    assert f"832 KiB: {alone['resident_share']:.0%} of the weights resident" in printed


def test_json_says_the_same_as_the_library(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--bandwidth", "2GB/s", "--latency", "0s", "--compute", "20ms", "--budget", "2MiB"]
    found = plan_json(capsys, str(path), *given)
    weights = planning.spread(planning.outline(path).weights, 20e-3)
    (expected,) = planning.predict(weights, budgets=[2 << 20], bandwidth=2e9, latency=0.0)
    (row,) = [row for row in found["budgets"] if row["budget"] == 2 << 20]
    assert row["seconds"] == expected.seconds and row["stall_seconds"] == expected.stall_seconds
    assert found["weights"] == 20 and found["weight_bytes"] == 20 * 4 * 256 * 256
    assert found["asked"] == [2 << 20] and found["smallest_budget"] == 4 * 256 * 256


def test_dtype_tokens_and_batch(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--compute", "1TFLOPS", "--tokens", "100"]
    once = plan_json(capsys, str(path), *given)
    twice = plan_json(capsys, str(path), *given, "--batch", "2", "--dtype", "bf16")
    assert twice["rows"] == 200 and twice["weight_bytes"] * 2 == once["weight_bytes"]
    compute = [found["budgets"][-1]["compute_seconds"] for found in (once, twice)]
    assert compute[0] == pytest.approx(2 * 20 * 256 * 256 * 100 / 1e12)
    assert compute[1] == pytest.approx(2 * compute[0])


def test_a_device_of_this_machine_is_measured(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, str(path), "--device", "cpu")
    assert "m.safetensors" in found["bandwidth_from"] and "cpu" in found["compute_from"]
    assert found["bandwidth"] > 1e6


def test_a_model_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models_to_plan.py").write_text(
        "import torch\n"
        "def make():\n    return torch.nn.Linear(64, 64), torch.randn(2, 64)\n"
        "def wrong():\n    return torch.nn.Linear(4, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    found = plan_json(capsys, "--model", "models_to_plan:make", "--device", "cpu", "--passes", "2")
    assert found["compute_from"] == "measured" and len(found["measured_compute_seconds"]) == 2
    for name, said in {
        "models_to_plan:wrong": "returned .*Linear",
        "models_to_plan:nothing": "no attribute 'nothing'",
        "no_such_module:make": "No module named 'no_such_module'; expected .* installed or in",
        "models_to_plan": "expected MODULE:FUNCTION",
    }.items():
        assert cli.main(["plan", "--model", name]) == 2
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(suffix: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"plan.{suffix}"
    assert cli.main(["plan", str(path), "--budget", "2MiB", "--compute", "5ms", "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 5000 and "drawn" in capsys.readouterr().out


@pytest.mark.slow
def test_budgets_are_named_outside_the_axes(path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dynswap_ext.planning.plot import draw

    weights = planning.spread(planning.outline(path).weights, 1e-4)
    budgets = [(1 << 20) + step * 100_000 for step in range(12)]
    figure = draw(planning.plan(weights, budgets=budgets, bandwidth=1e9), title="a" * 200)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert sum(name.startswith("1.") and "MiB: " in name for name in named) >= 10
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    assert not any(left.overlaps(right) for left, right in itertools.combinations(boxes, 2))
    for axes in figure.axes:
        assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
        assert axes.get_xscale() == axes.get_yscale() == "linear"
    around = [legend.get_window_extent(), figure._suptitle.get_window_extent()]
    around += [axes.get_tightbbox() for axes in figure.axes]
    assert not any(left.overlaps(right) for left, right in itertools.combinations(around, 2))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name either a checkpoint or config"),
        (["PATH", "--model", "a:b"], "name either"),
        (["PATH", "--tokens", "0"], "--tokens is 0"),
        (["PATH", "--bandwidth", "25Gbit/s"], "'25Gbit/s' is not a bandwidth"),
        (["PATH", "--compute", "fast"], "'fast' is not a time"),
        (["PATH", "--compute", "0TFLOPS"], "not a throughput above zero"),
        (["PATH", "--compute", "350ms", "--tokens", "5"], "leave out --tokens"),
        (["--model", "a:b", "--compute", "350ms"], "leave out --compute"),
        (["PATH", "--budget", "much"], "'much' is not a size"),
        (["PATH", "--budget", "minimun"], "Did you mean 'minimum'?"),
        (["PATH", "--budget", "auto"], "depends on the device's free memory"),
        (["PATH", "--budget", "0.25"], "a share of the model is --share"),
        (["PATH", "--share", "6GiB"], "'6GiB' is not a share of the model"),
        (["PATH", "--prefetch", "-1"], "prefetch is -1"),
        (["PATH", "--dtype", "int8"], "--dtype is 'int8'"),
        (["PATH", "--device", "toaster"], "toaster"),
        (["nothing.safetensors"], "no such file"),
    ],
)
def test_bad_options_are_explained(
    arguments: list[str], said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *(str(path) if word == "PATH" else word for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("dynswap: ") and said in printed.err and not printed.out


@pytest.mark.parametrize(("name", "said"), [("plan.doc", ".png, .svg"), ("gone/plan.png", "no folder")])
def test_a_picture_that_cannot_be_is_refused_first(
    name: str, said: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["plan", str(path), "--plot", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_a_picture_without_matplotlib_names_the_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["plan", str(path), "--plot", "plan.png"]) == 2
    assert "dynswap-ext[plot]" in capsys.readouterr().err


def test_units() -> None:
    assert parse_bandwidth("25GB/s") == 25e9 and parse_bandwidth("1 GiB / s") == 2**30
    assert parse_throughput("300TFLOPS") == 300e12 and parse_throughput("1.5 PFLOP/s") == 1.5e15
    assert parse_throughput("7 flops") == 7.0
    assert show_rate(25e9, "B/s") == "25 GB/s" and show_rate(60.2e6, "B/s") == "60.2 MB/s"
    assert show_rate(40.41e9, "FLOPS") == "40.41 GFLOPS" and show_rate(7, "B/s") == "7 B/s"
    assert parse_seconds("350ms") == pytest.approx(0.35) and parse_seconds("7us") == pytest.approx(7e-6)
    assert parse_seconds("2min") == 120 and parse_seconds(".5s") == 0.5
    for parse in (parse_bandwidth, parse_throughput, parse_seconds):
        for text in ("", "x", "-1s", "1.2.3s", "nan s"):
            with pytest.raises(ConfigError, match="is not a"):
                parse(text)
