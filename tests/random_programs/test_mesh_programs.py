"""Ranks that share out their copies give the right result, or an error in time, whatever one of them does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import pretend_cuda
from conftest import Provider
from mesh_programs import MISBEHAVES, TIMEOUT, run
from seeds import seeds

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="the ranks are forks"),
]


def test_ranks_that_share_out_copies(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not provider.native:
        pytest.skip("in pure Python, each rank copies all bytes")
    if provider.device.type != "cpu" and not pretend_cuda.active():
        pytest.skip("it needs a GPU for each rank")
    monkeypatch.setenv("DYNSWAP_MESH", "always")
    # On a device, what a missing rank keeps from beginning ends the process: NCCL does not give up otherwise.
    misbehave = MISBEHAVES if provider.device.type == "cpu" else MISBEHAVES[:1]
    gathered = 0
    for seed in seeds(range(14 if len(misbehave) > 1 else 6)):
        misbehaves = misbehave[seed % len(misbehave)]
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            told = run(provider.device.type, seed, misbehaves, folder)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {misbehaves}") from error
        for rank, each in enumerate(told):
            if "error" in each:
                assert misbehaves != "none", f"seed {seed}: {each}"
                assert "rank" in each["error"], f"seed {seed}: {each}"
            if rank != 1 and each.get("shared_out"):
                gathered += each["shared_out"]["gathered"]
            assert not each.get("violations"), f"seed {seed}: {each}"
            assert each.get("uninstalled_in", 0) < TIMEOUT + 2, f"seed {seed}: {each}"
    assert gathered > 0
