"""Reports and `dynswap info` say whether residents give way, and if not, why, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider

pretend_cuda = pytest.importorskip("pretend_cuda")
pytestmark = pytest.mark.skipif(not pretend_cuda.active(), reason="needs a device for which torch is known")


def test_a_report_says_whether_residents_give_way(provider: Provider) -> None:
    handle = provider.install(nn.Linear(8, 8), budget="auto")
    told = handle.report().giving_way
    if not provider.native:
        assert told is not None and told.startswith("do not give way in pure Python; reinstall it")
    elif pretend_cuda.device_type() == "cuda":
        assert told == ""
        assert "residents give way to whatever runs out of memory (so far 0 have, of 0 bytes)" in str(
            handle.report()
        )
    else:
        assert told is not None and "this type of device does not ask" in told
        assert "residents give way to other weights only: torch's allocator" in str(handle.report())


def test_a_budget_in_bytes_says_nothing_of_it(provider: Provider) -> None:
    handle = provider.install(nn.Linear(8, 8), budget="1MiB")
    assert handle.report().giving_way is None and "give way" not in str(handle.report())


@pytest.mark.device
def test_info_says_so_once_the_driver_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNSWAP_PROVIDER", raising=False)
    info = dynswap_ext.backend_info(ask_driver=True)
    if info.devices[-1] == "cpu":
        assert info.giving_way is None
        return
    asks = pretend_cuda.device_type() == "cuda"
    assert ("give way to whatever runs out of memory" in str(info)) == asks == (info.giving_way == "")


@pytest.mark.device
def test_an_allocator_without_callbacks_is_named() -> None:
    if pretend_cuda.device_type() != "cuda":
        pytest.skip("about CUDA's other allocator")
    settings = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "DYNSWAP_PROVIDER": "native"}
    done = subprocess.run(
        [sys.executable, "-m", "dynswap_ext", "info"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    told = " ".join(done.stdout.split())
    assert "give way to other weights only: the allocator that was chosen runs no callbacks" in told
    assert "backend:native" in told
    assert torch.__version__ in done.stdout
