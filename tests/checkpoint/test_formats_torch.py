"""Zip files of torch.save: where their tensors are, what else they hold, and that no code of theirs runs."""

from __future__ import annotations

import mmap
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_checkpoints import Canary, assert_same, refused, state, weights
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dynswap_ext.checkpoint.formats import open_checkpoint
from sample_models import Tied


def _save(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


class TestOffsets:
    def test_are_those_of_the_bytes(self, tmp_path: Path) -> None:
        path = _save(state(), tmp_path / "a file (deleted)")
        content = path.read_bytes()
        entries = open_checkpoint(path).entries
        assert entries.keys() == state().keys()
        for name, entry in entries.items():
            assert entry.offset is not None and entry.file == path
            assert content[entry.offset : entry.offset + entry.nbytes] == state()[name].numpy().tobytes()

    def test_show_ties(self, tmp_path: Path) -> None:
        entries = open_checkpoint(_save(Tied().state_dict(), tmp_path / "w")).entries
        assert entries["embedding.weight"].offset == entries["head.weight"].offset is not None

    def test_parts_of_one_tensor(self, tmp_path: Path) -> None:
        whole = torch.arange(24.0).reshape(6, 4)
        content = {"whole": whole, "rows": whole[2:4], "column": whole[:, 1], "turned": whole.t()}
        checkpoint = open_checkpoint(_save(content, tmp_path / "w"))
        entries = checkpoint.entries
        assert entries["whole"].offset is not None
        assert entries["rows"].offset == entries["whole"].offset + 2 * 4 * 4
        assert entries["column"].offset is entries["turned"].offset is None  # not in row-major order
        assert_same(weights(checkpoint), content)

    def test_what_has_no_range(self, tmp_path: Path) -> None:
        content = {
            "none": torch.zeros(0, 3),
            "meta": torch.zeros(3, device="meta"),
            "conj": torch.zeros(3, dtype=torch.complex64).conj(),
            "sparse": torch.eye(3).to_sparse(),
        }
        entries = open_checkpoint(_save(content, tmp_path / "w")).entries
        assert all(entry.offset is None for entry in entries.values())
        assert entries["sparse"].encoding == "torch.sparse_coo" and not entries["conj"].encoding


def test_tensor_subclass(tmp_path: Path) -> None:
    content = {"w": TwoTensor(torch.ones(2, 3), torch.zeros(2, 3)), "b": torch.ones(3)}
    with torch.serialization.safe_globals([TwoTensor]):
        checkpoint = open_checkpoint(_save(content, tmp_path / "w"))
    assert isinstance(checkpoint["w"], TwoTensor) and torch.equal(checkpoint["w"].a, torch.ones(2, 3))
    entry = checkpoint.entries["w"]
    assert (entry.encoding, entry.nbytes, entry.offset) == ("TwoTensor", 2 * 24, None)
    refused(tmp_path / "w", "holds more than tensors.*TwoTensor")  # not declared safe yet


class TestStateDicts:
    @pytest.mark.parametrize(
        "content",
        [
            {"model": state(), "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}},
            {"app": {"model": state(), "optim": {"state": {"w": {"step": torch.tensor(1.0)}}, "lr": 0.1}}},
            {"model": state(), "progress": {"step": torch.tensor(3)}, "epoch": 3},
            {**state(), "progress": {"step": torch.tensor(3)}, "epoch": 3},
        ],
        ids=["beside an optimizer", "one deeper", "beside a counter", "at the top"],
    )
    def test_found(self, content: dict[str, Any], tmp_path: Path) -> None:
        assert_same(weights(open_checkpoint(_save(content, tmp_path / "w"))), state())

    def test_none(self, tmp_path: Path) -> None:
        refused(_save({"lr": 0.1, "epoch": 3}, tmp_path / "w"), r"no state dict \(it holds a dict with 'lr'")

    def test_versions_and_extra_state(self, tmp_path: Path) -> None:
        content = nn.BatchNorm1d(3).state_dict()
        content["_extra_state"] = {"format": 1}
        checkpoint = open_checkpoint(_save(content, tmp_path / "w"))
        assert checkpoint["_extra_state"] == {"format": 1}
        assert checkpoint.versions == {"": {"version": 2}}


class TestCode:
    def test_does_not_run(self, tmp_path: Path) -> None:
        content = {**state(), "x._extra_state": Canary(tmp_path / "canary")}
        path = _save(content, tmp_path / "w")
        refused(path, r"may run any code: save just the weights.*weights_only=False.*mkdir")
        assert not (tmp_path / "canary").exists()

    def test_runs_when_said(self, tmp_path: Path) -> None:
        path = _save({**state(), "x._extra_state": Canary(tmp_path / "canary")}, tmp_path / "w")
        open_checkpoint(path, weights_only=False)
        assert (tmp_path / "canary").exists()

    def test_raising_is_an_error_of_the_file(self, tmp_path: Path) -> None:
        path = _save({**state(), "x._extra_state": Canary(tmp_path)}, tmp_path / "w")
        refused(path, r"cut short or damaged: .*File exists", weights_only=False)


class TestArchives:
    def _rewrite(self, source: Path, target: Path, compression: int, **replaced: bytes) -> Path:
        with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
            for name in old.namelist():
                new.writestr(name, replaced.get(name.partition("/")[2], old.read(name)))
        return target

    def test_compressed(self, tmp_path: Path) -> None:
        path = _save(state(), tmp_path / "w")
        refused(
            self._rewrite(path, tmp_path / "smaller", zipfile.ZIP_DEFLATED),
            r"record w/data\.pkl is compressed.*download or copy it again",
        )

    def test_other_zip_files(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "w", "w") as file:
            file.writestr("hello.txt", "hello")
        refused(tmp_path / "w", "not a zip file of torch.save")

    def test_records_of_one_name(self, tmp_path: Path) -> None:
        path = _save(state(), tmp_path / "w")
        with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("w/data.pkl", file.read("w/data.pkl"))
        refused(path, r"two records w/data\.pkl")

    def test_torchscript(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "w", "w") as file:
            file.writestr("w/version", "3")
            file.writestr("w/constants.pkl", "")
        refused(tmp_path / "w", r"TorchScript archive.*torch\.jit\.load\(path\)\.state_dict\(\)")

    def test_other_byte_order_is_read_and_not_mapped(self, tmp_path: Path) -> None:
        path = _save({"w": torch.arange(3, dtype=torch.int32)}, tmp_path / "w")
        other = "big" if sys.byteorder == "little" else "little"
        foreign = self._rewrite(path, tmp_path / "foreign", zipfile.ZIP_STORED, byteorder=other.encode())
        checkpoint = open_checkpoint(foreign)
        assert checkpoint["w"].tolist() == [0, 1 << 24, 2 << 24]
        assert checkpoint.entries["w"].offset is None


class TestTorchsOwnSettings:
    """A program's settings for its own `torch.load` make no mapping shared and no pickle unsafe."""

    def test_a_mapping_is_private(self, tmp_path: Path) -> None:
        path = _save({"w": torch.zeros(4096)}, tmp_path / "w")
        content = path.read_bytes()
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            open_checkpoint(path)["w"].fill_(1)
        assert path.read_bytes() == content

    def test_weights_only_can_be_forced(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
        path = _save({"w": nn.Linear(2, 2)}, tmp_path / "w")
        refused(path, "holds more than tensors", weights_only=False)

    def test_a_name_means_nothing(self, tmp_path: Path) -> None:
        path = _save({"w": torch.ones(3)}, tmp_path / "w.safetensors")
        assert torch.equal(open_checkpoint(path)["w"], torch.ones(3))
