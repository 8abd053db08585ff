"""Opening a checkpoint of many files reads only their headers, and getting a tensor reads nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sample_checkpoints import save_distributed, write_index

from dynswap_ext._util.file_mappings import drop_file_cache, mapped_ranges
from dynswap_ext._util.peak_memory import disk_bytes_read, resident_bytes
from dynswap_ext.checkpoint.formats import open_checkpoint

_TENSORS, _BYTES = 8, 8 << 20


def _state() -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.randn(_BYTES // 4) for number in range(_TENSORS)}


def _save(kind: str, folder: Path) -> Path:
    if kind == "distributed":
        return save_distributed({"model": _state()}, folder)
    files = {name: f"{number}.{kind}" for number, name in enumerate(_state())}
    for name, tensor in _state().items():
        if kind == "bin":
            torch.save({name: tensor}, folder / files[name])
        else:
            save_file({name: tensor}, folder / files[name])
    return write_index(folder / f"model.{kind}.index.json", files)


@pytest.mark.parametrize("kind", ["safetensors", "bin", "distributed"])
def test_nothing_is_read_but_headers(kind: str, tmp_path: Path) -> None:
    path = _save(kind, tmp_path)
    for file in tmp_path.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())  # dirty pages cannot be dropped
        drop_file_cache(file)
    read, used = disk_bytes_read(), resident_bytes()
    checkpoint = open_checkpoint(path)
    tensors = [checkpoint[name] for name in checkpoint]
    assert disk_bytes_read() - read < _TENSORS * _BYTES // 4
    assert resident_bytes() - used < _TENSORS * _BYTES // 4
    ranges = [found for file in checkpoint.files for found in mapped_ranges(file)]
    for tensor in tensors:
        assert any(start <= tensor.data_ptr() < start + length for start, length in ranges)
