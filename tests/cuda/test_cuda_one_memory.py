"""A device that computes in the host's memory: one warning says so, and no masters are copied."""

from __future__ import annotations

import warnings

import pytest
import torch

import dynswap_ext
import pretend_cuda
from dynswap_ext import _provider, testing
from gpu_under_test import LAYER_BYTES, LAYERS, Exact, Gpu


@pytest.fixture(autouse=True)
def _once() -> None:
    _provider._warn_once.cache_clear()


def said_by_installs(gpu: Gpu, **options: object) -> list[str]:
    """Install two models; return the warnings about the memory."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model = Exact().eval()
            moved, handle = gpu.pair(model, **options)
            x = gpu.whole_numbers()
            with torch.no_grad():
                testing.assert_bit_equal(model(x), moved(x))
            stats = handle.stats()
            if gpu.native and gpu.device.type != "cuda" and not options:
                assert stats.pinned_bytes == 0 and stats.staged_bytes == LAYERS * LAYER_BYTES
            handle.uninstall()
    texts = [str(one.message) for one in caught if issubclass(one.category, dynswap_ext.DynswapWarning)]
    others = ("pure Python on", "torch's own streams", "sampling")
    return [text for text in texts if not any(other in text for other in others)]


def test_it_is_said_once(gpu: Gpu) -> None:
    if not pretend_cuda.active():
        pytest.skip("a real device is what it is")
    pretend_cuda.faults().integrated = True
    (said,) = said_by_installs(gpu)
    assert "computes in the host's own memory" in said and f"model.to('{gpu.device}')" in said
    assert "one memory" in str(dynswap_ext.backend_info(ask_driver=True))
    pretend_cuda.faults().integrated = False
    assert "one memory" not in str(dynswap_ext.backend_info(ask_driver=True))


def test_a_device_with_its_own_memory(gpu: Gpu) -> None:
    if not pretend_cuda.active():
        pytest.skip("a real device is what it is")
    assert not [text for text in said_by_installs(gpu, host_budget="minimum") if "own memory" in text]


def test_an_install_that_is_refused_by_the_warning_leaves_the_model(gpu: Gpu) -> None:
    if not pretend_cuda.active():
        pytest.skip("a real device is what it is")
    pretend_cuda.faults().integrated = True
    model = Exact()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the host's own memory")
        with pytest.raises(dynswap_ext.DynswapWarning):
            gpu.install(model)
    assert not dynswap_ext.is_installed(model)
