"""checkpoint.summary and `dynswap show`: what they state is true, above all the smallest budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch import nn

from conftest import Provider
from dynswap_ext import checkpoint, cli, planning
from dynswap_ext._util.memory import format_bytes
from dynswap_ext.errors import BudgetError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(501, 303)
        self.head = nn.Linear(303, 501)
        self.head.weight = self.embed.weight


def _stack(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal layers": lambda: _stack(256, 256, 256, 256),
    "odd layers": lambda: _stack(33, 1001, 77, 3333, 5),
    "half": lambda: _stack(33, 1001, 77, 3333, 5).bfloat16(),
    "small": lambda: _stack(3, 5, 7),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 64, 7), nn.BatchNorm2d(64), nn.Conv2d(64, 333, 3, bias=False), nn.BatchNorm2d(333)
    ),
    "recurrent": lambda: nn.LSTM(200, 300, 2),
    "attention": lambda: nn.TransformerEncoderLayer(200, 4, 777),
    "tied": Tied,
    "wide bias": lambda: _stack(2, 50_000),
}


def _written(kind: str, model: nn.Module, folder: Path) -> Path:
    """Write a model in one of several formats, and return the path."""
    if kind == "library":
        save_model(model, str(folder / "model.safetensors"))
        return folder / "model.safetensors"
    if kind == "distributed":
        dcp.save(model.state_dict(), checkpoint_id=folder / "parts")
        return folder / "parts"
    name = {"save": "model.safetensors", "torch": "model.pt", "sharded": "shards"}[kind]
    return checkpoint.save(model, folder / name, max_shard_size="200KB" if kind == "sharded" else None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "kind",
    [
        "save",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("library", "torch", "sharded", "distributed")),
    ],
)
@pytest.mark.parametrize("name", _MODELS)
def test_the_smallest_budget_is_an_installs(
    provider: Provider, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNSWAP_PROVIDER", provider.backend)
    path = _written(kind, _MODELS[name](), tmp_path)
    found = checkpoint.summary(path)
    assert found.provider == provider.backend
    model = checkpoint.load(_MODELS[name], path)
    group = found.largest_groups.get("cpu" if provider.device.type == "cpu" else "accelerator")
    if group is None:  # on the CPU, pure Python computes with mapped memory
        assert provider.name == "python" and found.smallest_budget == 0
        provider.install(model, budget=1, strict_budget=True)
        return
    assert group.names and set(group.names) <= set(found.entries)
    smallest = group.nbytes
    if provider.native:
        on_cpu = provider.device.type == "cpu"
        weights = planning.outline(path, disk=on_cpu).weights
        planned = planning.plan(weights, bandwidth=1e9, backend="host" if on_cpu else "cuda")
        assert planned.smallest == smallest
    if name == "tied" and kind != "distributed" and provider.native and not on_cpu:
        # Stored once: the file does not tell that the second module has it, too, with its own bias.
        with pytest.raises(BudgetError) as caught:
            provider.install(model, budget=smallest, strict_budget=True)
        assert smallest < caught.value.smallest_bytes <= smallest + 501 * 4 + 512
        smallest = caught.value.smallest_bytes
    provider.install(model, budget=smallest, strict_budget=True).uninstall()
    if name == "recurrent" and kind == "library":  # sorted by name, so the order of weights is lost
        smallest -= 4 * 1200 * 4
    with pytest.raises(BudgetError) as caught:
        provider.install(model, budget=smallest - 1, strict_budget=True)
    assert caught.value.smallest_bytes >= smallest and format_bytes(smallest - 1) in str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.{name}": torch.zeros(100, 10) for i in range(32) for name in ("up", "down")}
    tensors |= {f"experts.{i}.{j}.w": torch.zeros(3).half() for i in (0, 1, 2, 7) for j in range(2)}
    tensors["layers.3.special"] = torch.zeros((), dtype=torch.int64)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "author": "me"})
    return tmp_path / "model.safetensors"


def test_summary(path: Path) -> None:
    found = checkpoint.summary(path)
    assert found.format == "safetensors" and found.files == (path,) and found.ties == ()
    assert found.bytes_by_dtype == {"float32": 64 * 4000, "float16": 8 * 6, "int64": 8}
    assert found.total_bytes == 64 * 4000 + 56 and len(found.entries) == 73
    assert found.metadata == {"format": "pt", "author": "me"} and not found.checksums
    assert checkpoint.summary(checkpoint.convert(path, path.with_name("b")).path).checksums


def test_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({}, tmp_path / "w.safetensors")
    found = checkpoint.summary(tmp_path / "w.safetensors")
    assert found.largest_group is None and found.smallest_budget == 0 and found.total_bytes == 0
    assert cli.main(["show", str(tmp_path / "w.safetensors")]) == 0
    assert checkpoint.convert(tmp_path / "w.safetensors", tmp_path / "v.safetensors").tensors == 0
    assert checkpoint.verify(tmp_path / "v.safetensors") == 0


def test_shared_tensors_count_once(tmp_path: Path) -> None:
    model = Tied()
    path = checkpoint.save(model, tmp_path / "w.safetensors")
    found = checkpoint.summary(path)
    assert found.ties == (("embed.weight", "head.weight"),)
    assert found.total_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert "embed.weight" not in found.metadata and "head.weight" not in found.metadata


def _printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_table(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = _printed(capsys, monkeypatch, str(path))
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert "layers.{0..31}.up 32 100 x 10 float32 125 KiB" in lines
    assert "layers.3.special 1 scalar int64 8 bytes" in lines
    assert "experts.{0..2,7}.{0..1}.w 8 3 float16 48 bytes" in lines
    found = checkpoint.summary(path)
    sizes = {device: group.nbytes for device, group in found.largest_groups.items()}
    assert sizes["cpu"] == found.smallest_budget != sizes["accelerator"]
    assert f"smallest budget {format_bytes(sizes['cpu'])} ({sizes['cpu']} bytes) on the CPU" in lines
    assert f"{format_bytes(sizes['accelerator'])} ({sizes['accelerator']} bytes) on an accelerator" in lines
    assert "format safetensors" in lines and "checksums none" in lines
    whole = _printed(capsys, monkeypatch, str(path), "--all")
    assert whole.count("layers.") >= 65 and "layers.17.up" in whole


def test_a_summary_is_printed_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("m.safetensors")  # a long one is shortened
    save_file({f"layers.{i}.weight": torch.ones(16, 16) for i in range(200)}, path)
    found = checkpoint.summary(path)
    assert cli.main(["show", str(path)]) == 0
    assert str(found).split() == capsys.readouterr().out.replace("--verify", "`verify`").split()
    assert "layers.{0..199}.weight" in str(found) and len(str(found).splitlines()) < 20
    assert repr(found) == f"<Summary of {path}: 200 tensors, 200 KiB>"


def test_the_table_says_if_figures_are_of_pure_python(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNSWAP_PROVIDER", "python")
    assert "3.906 KiB (4000 bytes) on an accelerator, in pure Python" in _printed(
        capsys, monkeypatch, str(path)
    )


def test_ties_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _printed(capsys, monkeypatch, str(checkpoint.save(Tied(), tmp_path / "w.safetensors")), "--verify")
    assert "embed.weight = head.weight" in text and "compared, and equal" in text


def test_budget(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = checkpoint.summary(path).smallest_budget
    assert "works: holds " in _printed(capsys, monkeypatch, str(path), "--budget", str(smallest))
    assert "holds all of it" in _printed(capsys, monkeypatch, str(path), "--budget", "1GB")
    assert cli.main(["show", str(path), "--budget", str(smallest - 1)]) == 1
    assert "is too small" in capsys.readouterr().out
    assert cli.main(["show", str(path), "--budget", "a lot"]) == 2


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checkpoint.summary(path)
    assert cli.main(["show", str(path), "--json", "--share", "1/2"]) == 0
    written: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert written["tensors"]["layers.0.up"]["shape"] == [100, 10] and len(written["tensors"]) == 73
    assert written["smallest_budget"] == found.smallest_budget == written["largest_group"]["bytes"]
    assert written["budget"] == {"bytes": found.total_bytes // 2, "works": True}
    assert written["total_bytes"] == found.total_bytes


def test_errors_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(tmp_path / "nothing")]) == 2
    assert "no such file" in capsys.readouterr().err
    save_file({"a": torch.zeros(2)}, tmp_path / "w.safetensors")
    assert cli.main(["show", str(tmp_path / "w.safetensors"), "--verify"]) == 2
    assert "no checksums" in capsys.readouterr().err


def test_names_with_brackets_and_odd_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(
        {"[red]a.0": torch.zeros(1), "[red]a.\u00b2": torch.zeros(1), "": torch.zeros(1)}, tmp_path / "w"
    )
    assert "[red]a.0" in _printed(capsys, monkeypatch, str(tmp_path / "w"))
