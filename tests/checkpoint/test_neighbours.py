"""Weights that are next to each other in a file are read in one request, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import dynswap_ext
from dynswap_ext import _provider, checkpoint

_LAYERS = 48
_Save = Callable[[nn.Module, Path], None]


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(_LAYERS)))


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (int(name.split(".")[0]), name))


def _save_with_safetensors(model: nn.Module, path: Path) -> None:
    """Save with biases before weights, as the library sorts names."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    state = model.state_dict()
    save_file({name: state[name] for name in _in_order(state)}, path)


def _requests() -> int:
    """Return the number of reads that this process has requested."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["syscr"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count reads")
@pytest.mark.parametrize("save", [checkpoint.save, _save_with_safetensors], ids=["own", "safetensors"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["moved", "cast"])
def test_a_group_is_one_request(tmp_path: Path, save: _Save, dtype: torch.dtype | None) -> None:
    if reason := _provider.native_unavailable(torch.device("cpu")):
        pytest.skip(reason)
    path = tmp_path / "model.safetensors"
    torch.manual_seed(0)
    written = _model()
    save(written, path)
    model = checkpoint.load(_model, path)
    budget = _LAYERS * 64 * 65 * (2 if dtype else 4) // 4
    x = torch.randn(2, 64, dtype=dtype)
    with (
        dynswap_ext.install(model, device="cpu", dtype=dtype, budget=budget, provider="native") as handle,
        torch.no_grad(),
    ):
        for _ in range(2):
            y = model(x)
        copies, requests = handle.stats().copies, _requests()
        for _ in range(10):
            y = model(x)
        copies = handle.stats().copies - copies
        # A prefetch may be under way at either end. A copy into two free parts of the ring is two requests.
        assert copies > 50
        assert _requests() - requests < 2 * copies
    assert torch.equal(y, written.to(dtype)(x))
