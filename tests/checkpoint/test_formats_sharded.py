"""Indexes with shards, and folders: which of them open, and the errors of wrong indexes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from sample_checkpoints import (
    assert_same,
    refused,
    save_distributed,
    state,
    weights,
    write_index,
    write_sharded,
)
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from dynswap_ext.checkpoint.formats import open_checkpoint


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("named", ["index", "folder"])
def test_shards_are_one_checkpoint(suffix: str, named: str, tmp_path: Path) -> None:
    index = write_sharded(tmp_path, suffix)
    checkpoint = open_checkpoint(index if named == "index" else tmp_path)
    assert_same(weights(checkpoint), state())
    assert len(checkpoint.files) == 3 and {entry.file for entry in checkpoint.entries.values()} == set(
        checkpoint.files
    )
    assert all(entry.offset is not None for entry in checkpoint.entries.values())


@pytest.mark.parametrize("safe", [True, False])
def test_as_the_hub_writes_them(safe: bool, tmp_path: Path) -> None:
    tensors = {f"layers.{number}.weight": torch.randn(64, 64) for number in range(8)}
    save_torch_state_dict(tensors, tmp_path, max_shard_size="50KB", safe_serialization=safe)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 2
    assert_same(weights(checkpoint), tensors)


def test_as_torch_distributed_writes_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(3)}
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2})
    save_distributed(tensors, tmp_path, storage_writer=writer)
    assert_same(weights(open_checkpoint(tmp_path)), tensors)


def test_modules_versions_and_extra_state_of_torch_shards(tmp_path: Path) -> None:
    first = torch.nn.BatchNorm1d(2).state_dict(prefix="a.")
    torch.save(first, tmp_path / "1.bin")
    torch.save({"b._extra_state": {"x": 1}, "b.weight": torch.zeros(1)}, tmp_path / "2.bin")
    names = {**dict.fromkeys(first, "1.bin"), "b._extra_state": "2.bin", "b.weight": "2.bin"}
    checkpoint = open_checkpoint(write_index(tmp_path / "pytorch_model.bin.index.json", names))
    assert checkpoint["b._extra_state"] == {"x": 1}
    assert checkpoint.versions is not None and checkpoint.versions["a"] == {"version": 2}


def test_a_snapshot_of_links_into_a_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted(write_sharded(tmp_path).parent.glob("model*"))):
        blob = file.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / file.name).symlink_to(Path("../blobs") / blob.name)
    assert_same(weights(open_checkpoint(tmp_path / "snapshot")), state())


class TestWrongIndex:
    def test_missing_shard(self, tmp_path: Path) -> None:
        index = write_sharded(tmp_path)
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
        refused(index, rf"{index} lists 1 tensors in .*00002.*no such file; download that shard")

    def test_shard_without_what_the_index_lists(self, tmp_path: Path) -> None:
        index = write_sharded(tmp_path)
        save_file({"other": torch.zeros(1)}, tmp_path / "model-00001-of-00003.safetensors")
        refused(index, rf"{index} lists 'embed.weight' in model-00001.*does not have it.*download both again")

    def test_shard_with_more_than_the_index_lists(self, tmp_path: Path) -> None:
        index = write_sharded(tmp_path)
        more = {"embed.weight": torch.zeros(4, 3), "other": torch.zeros(1)}
        save_file(more, tmp_path / "model-00001-of-00003.safetensors")
        refused(index, rf"{index} lists 'other' not in model-00001.*which has it.*download both again")

    def test_damaged_shard(self, tmp_path: Path) -> None:
        index = write_sharded(tmp_path)
        shard = tmp_path / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        refused(index, rf"a shard of {index} cannot be used: {shard} is cut short")

    def test_an_index_is_no_shard(self, tmp_path: Path) -> None:
        index = tmp_path / "model.safetensors.index.json"
        write_index(index, {"a": index.name})
        refused(index, "a shard of .* is neither")

    @pytest.mark.parametrize(
        "shard", ["../x", "a/../../x", "/etc/passwd", "", ".", "..", "a\0b", "\ud800", 3, None, ["x"], {}]
    )
    def test_shard_that_is_no_file_of_the_folder(self, shard: object, tmp_path: Path) -> None:
        index = write_index(tmp_path / "model.safetensors.index.json", {"weight": shard})
        refused(index, r"puts 'weight' into .*not a file in the index's folder; put the shards next to")

    @pytest.mark.parametrize(
        ("content", "pattern"),
        [
            (b"{", "damaged one: .*download"),
            (b"{}", r"has \[\], expected an object with a weight_map"),
            (b'{"weight_map": {}}', "expected an object with a weight_map"),
            (b'{"weight_map": [1]}', "expected an object with a weight_map"),
            (b'{"architectures": ["Llama"]}', r"has \['architectures'\], expected"),
            (b'{"weight_map": {"a": "x", "a": "y"}}', "it has 'a' twice"),
            (b'{"metadata": NaN}', "NaN"),
            (b"{\xff}", "utf-8"),
            (b'{"weight_map": ' + b'{"a":' * 100_000, "nested too deeply"),
        ],
    )
    def test_not_an_index(self, content: bytes, pattern: str, tmp_path: Path) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_bytes(content)
        refused(index, pattern)

    def test_index_of_a_size_that_none_has(self, tmp_path: Path) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_bytes(b"{" + b" " * 100)
        os.truncate(index, 1 << 40)
        refused(index, r"1 TiB \(1099511627776 bytes\), an index at most")

    def test_links_in_a_circle(self, tmp_path: Path) -> None:
        index = write_index(tmp_path / "model.safetensors.index.json", {"a": "x"})
        (tmp_path / "x").symlink_to("y")
        (tmp_path / "y").symlink_to("x")
        refused(index, "a shard of .*x is a symbolic link that leads back to itself")


class TestFolders:
    def test_safetensors_before_pickles(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, "bin")
        write_sharded(tmp_path, "safetensors")
        assert open_checkpoint(tmp_path).path.name == "model.safetensors.index.json"
        for file in tmp_path.glob("*.json"):
            file.unlink()
        for file in tmp_path.glob("*-0000[23]-*"):
            file.unlink()
        assert open_checkpoint(tmp_path).path.name == "model-00001-of-00003.safetensors"

    def test_what_trainers_write_beside_the_weights(self, tmp_path: Path) -> None:
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state_0.pth"):
            torch.save(state(), tmp_path / name)
        assert open_checkpoint(tmp_path).path.name == "pytorch_model.bin"

    def test_several(self, tmp_path: Path) -> None:
        for name in ("a.safetensors", "b.safetensors"):
            save_file(state(), tmp_path / name)
        refused(tmp_path, r"has 2 checkpoints \(a\.safetensors, b\.safetensors\); name the one")
        for name in ("a.index.json", "b.index.json"):
            write_index(tmp_path / name, {"a": "a.safetensors"})
        refused(tmp_path, r"has 2 indexes \(a\.index\.json, b\.index\.json\)")

    def test_none(self, tmp_path: Path) -> None:
        refused(tmp_path, "without a checkpoint.*it is empty")
        (tmp_path / "config.json").write_text(json.dumps({}))
        refused(tmp_path, r"without a checkpoint \(it has config\.json\)")

    def test_parts_of_a_distributed_save(self, tmp_path: Path) -> None:
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        save_distributed(state(), tmp_path, storage_writer=writer)
        refused(tmp_path, "one file for each process.*consolidate")
