"""`Stats` and the report say how many bytes of masters are page-locked, staged, and mapped from files."""

from __future__ import annotations

from pathlib import Path

import torch

from conftest import Provider
from dynswap_ext import checkpoint
from sample_models import mlp


def test_mapped_and_other_masters(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.save(mlp(256, 4), path)
    mapped, other = checkpoint.load(lambda: mlp(256, 4), path), mlp(256, 2)
    handle = provider.install([mapped, other], dtype=torch.float64, host_budget="minimum")
    x = provider.randn(2, 256)
    mapped(x), other(x)
    stats = handle.stats()
    assert stats.mapped_bytes == sum(p.nbytes for p in mapped.parameters())
    in_ram = sum(p.nbytes for p in other.parameters())
    on_cpu = provider.device.type == "cpu"
    # Small masters have page-locked copies, where anything is page-locked.
    assert (stats.staged_bytes, stats.pinned_bytes) == (0 if on_cpu else in_ram, 0)
    report = handle.report().text(width=200)
    assert "from files" in report and ("through a pinned buffer" in report) != on_cpu
    handle.uninstall()
    after = handle.stats()
    assert (after.pinned_bytes, after.staged_bytes, after.mapped_bytes) == (0, 0, 0)
