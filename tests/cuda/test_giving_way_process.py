"""Residents that give way in a process that forks, or in which torch records its memory."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch import nn

import dynswap_ext
from gpu_under_test import CAPPED_LAYER, CAPPED_WIDTH, cap, layers, only_pretended_cuda

pytestmark = [only_pretended_cuda, pytest.mark.usefixtures("gives_way")]

DEVICE = "cuda:0"
WIDTH = 64


def test_a_forked_child_can_drop_an_install_while_a_thread_of_the_parent_lends() -> None:
    """A forked child can end an install, though a thread of the parent held a mutex at the fork."""
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


def test_nothing_gives_way_while_torch_takes_stack_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No resident gives way while torch records stack traces, which need the GIL.

    A thread that holds the allocator's lock must not wait for that.
    """
    recorded = True
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: recorded, raising=False)
    model, x = layers(), torch.randn(4, CAPPED_WIDTH, device=DEVICE)
    with dynswap_ext.install(model, device=DEVICE, budget="auto") as handle:
        model(x)
        cap(4 * CAPPED_LAYER)
        assert "torch records the history of its memory" in str(handle.report())
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(10 * CAPPED_LAYER, dtype=torch.uint8, device=DEVICE)
        assert handle.stats().given_way == 0 < handle.stats().resident_groups
        recorded = False
        model(x)
        torch.empty(10 * CAPPED_LAYER, dtype=torch.uint8, device=DEVICE)
        assert handle.stats().given_way > 0
