"""A loaded model and its mappings are freed with the last reference."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynswap_ext import checkpoint


@pytest.mark.parametrize(
    "options",
    [{}, {"assign": False}, {"dtype": torch.bfloat16}, {"device": "cpu"}],
    ids=["mapped", "copied", "cast", "on a device"],
)
@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_nothing_keeps_a_loaded_model(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    checkpoint.save(model, tmp_path / name)
    gc.collect()
    gc.disable()
    try:
        loaded = checkpoint.load(model, tmp_path / name, **options)
        kept = [weakref.ref(tensor) for tensor in (*loaded.parameters(), *loaded.buffers())]
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in loaded.parameters()]
        del model, loaded
        assert not any(reference() is not None for reference in kept)
        assert not any(reference() is not None for reference in storages)
    finally:
        gc.enable()
