"""Fused weights that are mapped from the places of their parts: Note [A fused weight is a mapping]."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dynswap_ext import checkpoint, testing
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext.checkpoint.loading.assembly import MappedFusion

COUNT, ROWS, COLUMNS = 12, 128, 256


def written(path: Path, seed: int = 0) -> list[Tensor]:
    """Write a file of matrices. safetensors sorts by name, so the tenth of twelve is at its end."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(COUNT)]
    save_file({f"experts.{number}": part for number, part in enumerate(parts)}, path)
    return parts


def opened(path: Path) -> list[Tensor]:
    with safe_open(path, "pt") as file:
        return [file.get_tensor(f"experts.{number}") for number in range(COUNT)]


def mapped(tensor: Tensor) -> int:
    found = FileMappings().overlapping(tensor.data_ptr(), tensor.nbytes)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(min(one.end, end) - max(one.begin, begin) for one in found)


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_fused_weight_is_saved_again(tmp_path: Path, shuffled: bool) -> None:
    """A fused weight has the right values, and can be saved and loaded.

    A part at the end of its file is followed by another part in a page that the file only has in part.
    """
    parts = written(tmp_path / "a.safetensors")
    order = torch.randperm(COUNT).tolist() if shuffled else list(range(COUNT))
    with MappedFusion():
        tensors = opened(tmp_path / "a.safetensors")
        fused = torch.stack([tensors[number] for number in order])
    expected = torch.stack([parts[number] for number in order])
    assert mapped(fused) == fused.nbytes
    testing.assert_bit_equal(fused, expected)
    module = nn.Module()
    module.weight = nn.Parameter(fused)
    checkpoint.save(module, tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        testing.assert_bit_equal(file.get_tensor("weight"), expected)


def test_files_that_are_opened_one_after_the_other(tmp_path: Path) -> None:
    """A fused weight has the right values if its file is mapped where an earlier file was."""
    addresses = set()
    with MappedFusion():
        for number in range(6):
            path = tmp_path / f"{number}.safetensors"
            parts = written(path, seed=number)
            tensors = opened(path)
            addresses.add(tensors[0].data_ptr())
            fused = torch.cat(tensors)
            testing.assert_bit_equal(fused, torch.cat(parts), f"file {number}")
            del tensors, fused
            gc.collect()
    assert len(addresses) < 6


def test_a_file_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for seed in range(2):
        path.unlink(missing_ok=True)
        with MappedFusion():
            parts = written(path)
            testing.assert_bit_equal(torch.cat(opened(path)), torch.cat(parts))
            written(tmp_path / "b.safetensors", seed=1)
            (tmp_path / "b.safetensors").replace(path)
            new = [part.clone() for part in opened(path)]
            testing.assert_bit_equal(torch.cat(opened(path)), torch.cat(new), f"{seed}")


def test_parts_that_were_written_to(tmp_path: Path) -> None:
    """Parts that were written through `.data`, which bumps no version, are copied with their new values."""
    written(tmp_path / "a.safetensors")
    with MappedFusion():
        tensors = opened(tmp_path / "a.safetensors")
        tensors[3].data.mul_(-1)
        expected = torch.cat([tensor.clone() for tensor in tensors])
        fused = torch.cat(tensors)
    testing.assert_bit_equal(fused, expected)
    assert mapped(fused) == 0


def test_more_parts_than_a_process_may_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = written(tmp_path / "a.safetensors")
    limit = 2 * (len(FileMappings()) + 3 * COUNT)
    monkeypatch.setattr("dynswap_ext.checkpoint.loading.assembly._most_mappings", lambda: limit)
    with MappedFusion():
        tensors = opened(tmp_path / "a.safetensors")
        kept = [torch.cat(tensors[::-1]) for _ in range(6)]
    assert mapped(kept[0]) == kept[0].nbytes and mapped(kept[-1]) == 0
    for fused in kept:
        testing.assert_bit_equal(fused, torch.cat(parts[::-1]))


def test_what_torch_refuses_is_refused_by_torch(tmp_path: Path) -> None:
    written(tmp_path / "a.safetensors")
    with MappedFusion():
        tensors = opened(tmp_path / "a.safetensors")
        with pytest.raises(IndexError, match="expected to be in range of"):
            torch.cat(tensors, dim=5)
        with pytest.raises(ValueError, match="non-empty list"):
            torch.cat([])


def test_sparse_tensors_are_fused_as_usual() -> None:
    sparse = torch.eye(8).to_sparse()
    with MappedFusion():
        fused = torch.cat([sparse, sparse])
    assert torch.equal(fused.to_dense(), torch.cat([torch.eye(8)] * 2))
