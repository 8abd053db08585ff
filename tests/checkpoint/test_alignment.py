"""Tensors in files of `save` and `convert` are aligned for vector instructions and cache lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dynswap_ext import checkpoint


def _model() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(33, 9),  # 1188 and 36 bytes: neither a multiple of 64
        nn.Linear(9, 64),
        nn.BatchNorm1d(64),  # with a counter of 8 bytes
        nn.LSTM(16, 48),
        nn.Linear(64, 5, bias=False).half(),
        nn.Linear(64, 32).bfloat16(),
    )
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    return model


def _addresses(path: Path) -> dict[str, tuple[int, torch.Tensor]]:
    model = checkpoint.load(_model, path)
    return {name: (tensor.data_ptr(), tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["save", "shards", "convert", "cast"])
def test_safetensors(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    if kind in ("save", "shards"):
        path = checkpoint.save(_model(), path, max_shard_size="8KB" if kind == "shards" else None)
    else:
        save_file(_model().state_dict(), tmp_path / "source")
        dtype = torch.float16 if kind == "cast" else None
        path = checkpoint.convert(tmp_path / "source", path, dtype=dtype).path
    found = _addresses(path)
    multiples = {name for name, (_, tensor) in found.items() if tensor.nbytes % 64 == 0}
    assert {"1.weight", "3.weight_ih_l0", "5.weight"} <= multiples
    for name, (address, tensor) in found.items():
        assert address % (64 if name in multiples else tensor.element_size()) == 0, name


def test_torch_files_align_every_tensor(tmp_path: Path) -> None:
    found = _addresses(checkpoint.save(_model(), tmp_path / "w.pt"))
    assert [name for name, (address, tensor) in found.items() if tensor.numel() and address % 64] == []
