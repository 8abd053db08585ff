"""Residents that give way, and forks of the process."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import dynswap_ext
from gpu_under_test import Gpu

pretend_cuda = pytest.importorskip("pretend_cuda")
pytestmark = pytest.mark.skipif(
    not pretend_cuda.active() or pretend_cuda.device_type() != "cuda",
    reason="needs a CUDA device of which the test may have its way: the pretend one",
)

DEVICE = "cuda:0"
WIDTH = 64


@pytest.fixture(autouse=True)
def _native(gpu: Gpu) -> None:
    if not gpu.native:
        pytest.skip("the pure-Python provider's residents do not give way")


def test_a_forked_child_can_drop_an_install_while_a_thread_of_the_parent_lends() -> None:
    """The child would find a mutex locked by a thread that it does not have."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(64))).requires_grad_(False)
    handle = dynswap_ext.install(model, device=DEVICE, budget="auto")
    model(torch.randn(4, WIDTH, device=DEVICE))
    assert handle.stats().resident_groups > 0
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
            torch.cuda.empty_cache()  # so that the next one asks for memory again

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(60):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                del handle, model  # the last to have them
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    handle.uninstall()
