"""If a system grants less page-locked memory than the masters take, the others are streamed all the same."""

from __future__ import annotations

import warnings

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext import testing
from dynswap_ext._util.memory import exact_bytes
from gpu_under_test import LAYER_BYTES, Exact, Gpu

#: Bytes of the ring of page-locked buffers for masters that are not page-locked.
RING_BYTES = 64 << 20
LAYERS = 20


@pytest.fixture(autouse=True)
def _can_refuse(gpu: Gpu) -> None:
    only_cuda_has("page-locking in place")
    if not pretend_cuda.active():
        pytest.skip("takes a runtime that can be told to refuse")
    if not gpu.native:
        pytest.skip("pure Python does not page-lock")


@pytest.mark.parametrize("locked", [0, 6])
def test_refusals_midway_through_an_install(gpu: Gpu, locked: int) -> None:
    """The system may refuse to lock memory midway, as WSL does, which also limits the ring's buffers."""
    faults = pretend_cuda.faults()
    model = Exact(LAYERS).eval()
    faults.locked_at_most = RING_BYTES + locked * LAYER_BYTES + LAYER_BYTES // 2
    with pytest.warns(dynswap_ext.DynswapWarning, match="refused to page-lock") as caught:
        moved, handle = gpu.pair(model)
        handle.retune()
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(5):  # the fourth makes a new plan
            testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert stats.pinned_bytes == locked * LAYER_BYTES
    assert stats.staged_bytes == (LAYERS - locked) * LAYER_BYTES
    said = [str(one.message) for one in caught if "page-lock" in str(one.message)]
    assert len(said) == 1
    assert f"to page-lock {exact_bytes((LAYERS - locked) * LAYER_BYTES)} of weights" in said[0]
    assert (f", after it had locked {exact_bytes(locked * LAYER_BYTES)}: " in said[0]) == (locked > 0)
    assert "pass host_budget='minimum' to install()" in said[0]
    assert "ulimit" not in said[0], "NVIDIA's driver heeds no limit of locked memory"
    assert pretend_cuda.last_error() == 0, "an innocent call would report it"
    handle.uninstall()
    with warnings.catch_warnings():  # the remedy of the warning
        warnings.simplefilter("error", dynswap_ext.DynswapWarning)
        handle = gpu.install(model, dtype=torch.float64, host_budget="minimum")
    assert handle.stats().pinned_bytes == 0
    handle.uninstall()
    faults.locked_at_most = 2**64 - 1
    handle = gpu.install(model)
    assert handle.stats().staged_bytes == 0
