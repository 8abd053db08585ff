"""`budget="auto"` if torch does not know all: without its cache, and with other processes on the device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext.errors import ConfigError
from gpu_under_test import Gpu

only_cuda_has("a caching allocator that can be turned off", whole_module=True)

MIB = 1 << 20
LAYERS, WIDTH = 8, 1024
LAYER = 4 * WIDTH * WIDTH


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).requires_grad_(False)


@pytest.mark.parametrize("how", ["install", "retune"])
def test_without_the_cache_it_is_refused(gpu: Gpu, how: str) -> None:
    """Without torch's caching allocator, "auto" is refused, as all statistics are 0.

    Weights that stay would take all memory, and activations would find none.
    """
    if not hasattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled"):
        pytest.skip("this torch does not tell whether its allocator caches")
    model = layers()
    handle = gpu.install(model, budget="minimum") if how == "retune" else None
    torch.cuda.caching_allocator_enable(False)
    try:
        with pytest.raises(ConfigError, match=r"torch's caching allocator is turned off.*budget in bytes"):
            gpu.install(model, budget="auto") if handle is None else handle.retune("auto")
    finally:
        torch.cuda.caching_allocator_enable(True)


PROGRAM = f"""
import torch, dynswap_ext
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
model.requires_grad_(False)
x = torch.randint(0, 3, (2, {WIDTH})).float()
expected = model(x)
try:
    dynswap_ext.install(model, device="cuda:0", budget="auto")
except dynswap_ext.ConfigError as error:
    print(error)
with dynswap_ext.install(model, device="cuda:0", budget="16MiB") as handle, torch.no_grad():
    for _ in range(4):
        assert torch.allclose(model(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    assert handle.stats().resident_bytes > 0
print("served")
"""


def test_the_variable_of_torch_turns_it_off_and_a_budget_in_bytes_works(gpu: Gpu) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "DYNSWAP_PROVIDER": gpu.provider.backend},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in done.stdout and done.stdout.endswith("served\n")


def test_beside_another_process_residents_take_what_that_leaves(gpu: Gpu) -> None:
    if not pretend_cuda.active():
        pytest.skip("needs a device whose memory another process takes: the pretend one")
    torch.cuda.empty_cache()
    faults, model = pretend_cuda.faults(), layers()
    faults.taken_by_others = (
        faults.memory_bytes - torch.cuda.memory_reserved() - int(0.03 * faults.memory_bytes) - 5 * LAYER
    )
    x = torch.ones(2, WIDTH, device=gpu.device)
    with gpu.install(model, budget="auto") as handle, torch.no_grad():
        for _ in range(5):
            model(x)
        stats = handle.stats()
        assert 0 < stats.resident_bytes + stats.arena_bytes <= 5 * LAYER
        faults.taken_by_others += LAYER  # it takes more: planned weights stay, and calls go on
        for _ in range(3):
            model(x)
