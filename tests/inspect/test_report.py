"""`handle.report()`: figures that agree with the counters, and a diagnosis that names the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sample_recordings import FakeSession
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import checkpoint
from dynswap_ext._util.memory import format_bytes
from dynswap_ext.profile.recording import CAUSES
from dynswap_ext.profile.report import Report
from sample_models import mlp

SUMMED = ("hits", "late_hits", "misses", "copies", "bytes_moved")


def names_of(report: Report) -> list[str]:
    return sorted(name for row in report.rows for name in row.names)


@pytest.mark.parametrize("budget", [None, "3MiB", "64MiB"])
def test_rows_add_up_to_the_counters(provider: Provider, budget: str | None) -> None:
    model = mlp(features=256, layers=6)
    handle = provider.install(model, dtype=torch.float64, budget=budget)
    for _ in range(3):
        model(provider.randn(2, 256))
    report = handle.report()
    stats = report.stats
    for key in SUMMED:
        assert sum(getattr(row, key) for row in report.rows) == getattr(stats, key), key
    assert stats.bytes_moved > 0
    assert sum(row.resident for row in report.rows) == stats.resident_groups
    assert names_of(report) == sorted(name for name, _ in model.named_parameters())
    for row in report.rows:
        assert sum(row.causes.values()) == row.stall_ns and set(row.causes) <= set(CAUSES)
    assert report.stall_ns == sum(report.causes.values())


def test_rows_are_in_the_order_of_use(provider: Provider) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(1024, 1024, bias=False)
            self.first = nn.Linear(1024, 1024, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))

    model = Backwards()
    handle = provider.install(model, dtype=torch.float64)
    for _ in range(2):
        model(provider.randn(2, 1024))
    assert [row.names for row in handle.report().rows] == [("first.weight",), ("last.weight",)]


def test_the_source_of_masters(provider: Provider, mapped: Callable[[nn.Module], nn.Module]) -> None:
    in_ram, on_disk = mlp(features=256), mapped(mlp(features=256))
    options = {"dtype": torch.float64, "host_budget": "minimum"}
    assert {row.source for row in provider.install(in_ram, **options).report().rows} == {"RAM"}
    assert {row.source for row in provider.install(on_disk, **options).report().rows} == {"file"}


def test_it_answers_after_an_uninstall_and_after_the_model(provider: Provider) -> None:
    model = mlp(features=256)
    handle = provider.install(model, dtype=torch.float64, budget="64MiB")
    model(provider.randn(2, 256))
    before = handle.report()
    handle.uninstall()
    assert handle.report().rows == before.rows and before.rows
    del model
    assert handle.report().as_dict()["groups"] == before.as_dict()["groups"]


def test_reset_stats_resets_rows_and_not_the_history(provider: Provider) -> None:
    model = mlp(features=256)
    handle = provider.install(model, dtype=torch.float64)
    model(provider.randn(2, 256))
    handle.reset_stats()
    assert handle.report().stall_ns == 0 and all(row.copies == 0 for row in handle.report().rows)
    model(provider.randn(2, 256))
    assert "first use" not in handle.report().causes


def test_nothing_used_and_nothing_to_move(provider: Provider) -> None:
    assert "nothing has been used yet" in provider.install(mlp(), dtype=torch.float64).report().diagnosis
    if provider.device.type == "cpu":
        assert provider.install(mlp()).report().diagnosis.startswith("no weight has to be moved")


def test_what_changes_a_master_is_the_cause() -> None:
    model = mlp(features=64)
    with dynswap_ext.install(
        model, device="cpu", dtype=torch.float64, provider="python", budget="1MiB"
    ) as handle:
        x = torch.randn(2, 64, dtype=torch.float64)
        model(x)
        with torch.no_grad():
            next(model.parameters()).mul_(2)  # in place
            model[2].weight = nn.Parameter(torch.randn(64, 64))  # another one
        handle.reset_stats()
        model(x)
        changed = {row.names[0] for row in handle.report().rows if row.causes}
        assert changed == {"0.weight", "2.weight"}
        assert set(handle.report().causes) == {"master changed"}
        assert handle.report().diagnosis.startswith("master changed: 100 %")


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("bus-bound", r"keeping more weights on the device would help: budget="),
        ("late prefetch", r"a deeper prefetch would help: prefetch=4"),
        ("not predicted", r"order of use differs .* budget="),
        ("arena full", r"a larger budget would help: budget="),
        ("slot held", r"drop tensors of head\.weight .* budget="),
        ("master changed", r"what writes to the masters"),
    ],
)
def test_the_diagnosis_names_the_main_cause_and_the_remedy(cause: str, advice: str) -> None:
    session = FakeSession(6)
    for figure in session.figures:
        figure["causes"] = {"first use": 10**6}
    session.figures[2]["causes"] = {cause: 10**8, "first use": 10**6}
    session.figures[2]["held_by"], session.figures[2]["misses"] = "head.weight", 9
    diagnosis = session.report().diagnosis
    assert diagnosis.startswith(f"{cause}: 94 % of 106 ms of waiting was ")
    assert "(6 % was for the first use" in diagnosis
    assert re.search(advice, diagnosis), diagnosis


def test_an_order_that_is_being_learned_is_not_called_a_branch() -> None:
    session = FakeSession(6)
    session.figures[2].update(causes={"not predicted": 10**8}, misses=2)
    diagnosis = session.report().diagnosis
    assert (
        "was still being learned (backward has one of its own)" in diagnosis and "branches" not in diagnosis
    )
    session.figures[2]["misses"] = 3
    assert "branches" in session.report().diagnosis


def test_a_first_pass_is_not_blamed_on_anything_else() -> None:
    session = FakeSession(6)
    for figure in session.figures:
        figure["causes"] = {"first use": 10**8}
    assert session.report().diagnosis.startswith("first use: all of 600 ms of waiting")
    session.figures[2]["causes"]["bus-bound"] = 10**6
    diagnosis = session.report().diagnosis
    assert (
        diagnosis.startswith("first use: 100 % of 601 ms")
        and "Of the rest, 1 ms was for the bus" in diagnosis
    )


def test_the_budget_that_is_advised_follows_from_the_stall() -> None:
    """Of 200 ms of copies, 50 are waited for, so the advice is room for a quarter of the streamed bytes."""
    session = FakeSession(60)
    for figure in session.figures:
        figure.update(causes={}, copy_ns=0 if figure["resident"] else 5 * 10**6)
    session.figures[0]["causes"] = {"bus-bound": 50 * 10**6}
    now = (sum(session.resident) + 3) * 12
    report = session.report(budget=now << 20)
    assert f'budget="{now + 40 * 12 // 4}MiB" (now {now} MiB)' in report.diagnosis


def test_repeated_layers_share_a_line() -> None:
    report = FakeSession(60, residents=0).report()
    short = report.text(width=200)
    assert "blocks.{0..57} (attention.qkv" in short
    assert len(short.splitlines()) < 20 < 60 < len(report.text(collapse=False, width=200).splitlines())
    apart = FakeSession(12).report().text(width=200)  # residents are listed separately
    assert "blocks.{1..2,4..5,7..8}" in apart and "blocks.{0…9}" in apart


@pytest.mark.parametrize("width", [80, 120, 200])
def test_it_fits_the_terminal(width: int) -> None:
    text = FakeSession(60, skipped=3).report().text(width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "first use" in text.replace("\n", " ")
    known = {word for row in FakeSession(60).figures for name in row["names"] for word in name.split(".")}
    rule = next(i for i, line in enumerate(lines) if line.startswith(" ──"))
    beside = lines[rule - 1].index("bytes" if width < 100 else "groups") - 1
    cells = [line[:beside] for line in lines[rule + 1 : lines.index("", rule)]]
    shown = {word for cell in cells for word in re.findall("[a-z_]+", cell)}
    assert {"attention", "blocks"} < shown <= known | {"all", "weights", "each"}
    assert "A group of weights travels in one copy" in text and "first use: a wait for weights" in text


def test_it_prints_and_serialises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    report = FakeSession(5).report()
    print(report)
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith(report.diagnosis) or report.diagnosis.split(";")[0] in shown.replace(
        "\n", " "
    )
    assert "embed.weight" in shown and "resident" in shown and "prefetch 2" in shown
    content = json.loads(json.dumps(report.as_dict()))
    assert content["groups"][0]["names"] == ["embed.weight"] and content["diagnosis"] == report.diagnosis


def test_masters_that_were_trained_are_no_longer_the_files(provider: Provider, tmp_path: Path) -> None:
    if not provider.native:
        pytest.skip("pure Python reads through the mapping, and reports RAM")

    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])

    checkpoint.save(make(), tmp_path / "model.safetensors")
    model = checkpoint.load(make, tmp_path / "model.safetensors")
    handle = provider.install(model, budget="256KiB")
    model(provider.randn(2, 128, dtype=torch.float32)).sum().backward()
    assert {row.source for row in handle.report().rows} == {"file"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model(provider.randn(2, 128, dtype=torch.float32))
    assert {row.source for row in handle.report().rows} == {"RAM"}


def test_coded_masters_move_fewer_bytes_than_they_stand_for(provider: Provider, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]).bfloat16()

    paths = {name: tmp_path / f"{name}.safetensors" for name in ("plain", "coded")}
    checkpoint.save(make(), paths["plain"])
    checkpoint.convert(paths["plain"], paths["coded"], lossless=True)
    found = {}
    for name, path in paths.items():
        model = checkpoint.load(make, path)
        handle = provider.install(model, dtype=torch.float32, budget="256KiB")
        model(provider.randn(2, 256, dtype=torch.float32))
        stats, text = handle.stats(), handle.report().text(width=200)
        moved, decoded = format_bytes(stats.bytes_moved), format_bytes(stats.bytes_decoded)
        if name == "plain":
            assert stats.bytes_moved == stats.bytes_decoded > 0 and "coded:" not in text
        elif stats.bytes_moved:  # pure Python decodes masters in RAM where they are, and counts no copies
            assert 1.35 < stats.bytes_decoded / stats.bytes_moved < 1.45
            assert f"coded: {moved} moved stand for {decoded}, 1.4" in text
        found[name] = stats.bytes_decoded
    assert found["coded"] in ((found["plain"],) if provider.native else (found["plain"], 0))
