"""Files in the lossless code that are damaged or made to harm: an error that names file and weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from sample_checkpoints import SAMPLES, look, refused
from test_formats_fuzz import _bounded_memory, _places, _put, _values, fuzzed
from torch import nn

from dynswap_ext import checkpoint
from dynswap_ext.checkpoint.formats.safetensors_file import CODED
from dynswap_ext.errors import SourceError


def with_metadata(path: Path, change: Callable[[Any], Any]) -> Path:
    """Write a file in which what describes the coded entries is changed."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    changed = change(json.loads(header["__metadata__"][CODED]))
    header["__metadata__"][CODED] = changed if isinstance(changed, str) else json.dumps(changed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda _: "nonsense", "of them cannot be read here"),
        (lambda _: [], "of them cannot be read here"),
        (lambda found: {**found, "version": 2}, "its version is 2, and 1 is read here; update dynswap_ext"),
        (lambda found: {"version": 1}, "'tensors' is missing"),
        (lambda found: {"version": 1, "tensors": {"missing": {}}}, "'missing'"),
        (lambda found: {"version": 1, "tensors": {"a.weight": {"dtype": "F4", "shape": [1]}}}, "'F4'"),
        (
            lambda found: {"version": 1, "tensors": {"a.weight": {"dtype": "I16", "shape": [40, 60]}}},
            "stand for",
        ),
        (lambda found: {"version": 1, "tensors": {"a.weight": {"dtype": "BF16", "shape": [0]}}}, "stand for"),
        (
            lambda found: {"version": 1, "tensors": {"a.weight": {"dtype": "BF16", "shape": [1 << 40]}}},
            "stand for",
        ),
        (
            lambda found: {"version": 1, "tensors": {"a.weight": {"dtype": "BF16", "shape": [-1]}}},
            "length -1",
        ),
        (
            lambda found: {"version": 1, "tensors": {"scale": {"dtype": "F32", "shape": []}}},
            "torch.float32 cannot",
        ),
    ],
)
def test_metadata_that_cannot_be(change: Callable[[Any], Any], pattern: str, tmp_path: Path) -> None:
    path = with_metadata(SAMPLES["lossless"](tmp_path).opened, change)
    refused(path, pattern)
    with safe_open(path, "pt") as file:  # which the library opens
        assert "a.weight" in file.keys()  # noqa: SIM118


@fuzzed
@given(data=st.data())
def test_other_values_in_the_metadata(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = SAMPLES["lossless"](tmp_path_factory.mktemp("lossless")).opened

    def change(found: Any) -> Any:
        for _ in range(data.draw(st.integers(1, 3))):
            _put(found, data.draw(st.sampled_from(list(_places(found)))), data.draw(_values))
        return found

    with _bounded_memory():
        look(with_metadata(path, change))


def test_damaged_bytes_are_named(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"first": nn.Linear(64, 300)})

    model = make()
    path = checkpoint.save(model, tmp_path / "model.safetensors", lossless=True)
    entry = checkpoint.open_checkpoint(path).entries["first.weight"]
    with path.open("rb+") as file:
        file.seek((entry.offset or 0) + 8)
        file.write(b"\xff" * 8)
    with pytest.raises(SourceError, match=r"checksums differ.*first\.weight"):
        checkpoint.verify(path)
    loaded = checkpoint.load(make, path)  # reads nothing
    with pytest.raises(SourceError, match=rf"first\.weight in {path} cannot be read"):
        loaded["first"](torch.ones(64))
    for call in (
        lambda: checkpoint.load(make(), path, assign=False),
        lambda: checkpoint.load(make, path, dtype=torch.bfloat16),
        lambda: checkpoint.load(make, path, coded=True),
        lambda: checkpoint.convert(path, tmp_path / "out.safetensors"),
        lambda: checkpoint.save(loaded, tmp_path / "out.safetensors"),
    ):
        with pytest.raises(SourceError, match=r"first\.weight in .*model\.safetensors cannot be read"):
            call()
