"""What a driver may answer instead of doing as it is asked. Only the pretend device gives such answers."""

from __future__ import annotations

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import ENGINE, only_cuda_has
from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu

RING = 3 * 2 * LAYER_BYTES
DELAY = 20.0  # milliseconds


@pytest.fixture(autouse=True)
def _pretend(gpu: Gpu) -> None:
    only_cuda_has("the errors of its driver")
    if not pretend_cuda.active():
        pytest.skip("a real driver does not answer so on request")
    if not gpu.native:
        pytest.skip("pure Python asks the driver nothing")


@pytest.mark.parametrize("code", [1, 400, 906], ids=["invalid value", "invalid handle", "capture implicit"])
def test_a_question_that_is_not_answered(gpu: Gpu, code: int) -> None:
    """An event that cannot be asked is not over: its slot is not written, nor read, without a wait."""
    model = Exact().eval()
    moved, handle = gpu.pair(model, budget=RING)
    inputs = [gpu.whole_numbers(seed=seed) for seed in range(3)]
    with torch.no_grad():
        expected = [moved(x) for x in inputs]
        gpu.synchronise()
        pretend_cuda.faults().query_error = code
        outputs = []
        for x in inputs:
            gpu.delay(DELAY)
            outputs.append(model(x))
        pretend_cuda.faults().query_error = 0
    gpu.synchronise()
    testing.assert_bit_equal(outputs, expected)
    assert handle.stats().overflow_bytes == 0


def test_a_device_for_which_no_kernel_was_compiled(gpu: Gpu) -> None:
    """Weights are cast on the host, which is said once."""
    if ENGINE == "torch":
        pytest.skip("torch has kernels of its own")
    pretend_cuda.faults().no_kernel_image = True
    model = Exact().eval()
    moved, handle = gpu.pair(model, torch.bfloat16, budget=RING)
    x = gpu.whole_numbers(dtype=torch.bfloat16)
    with torch.no_grad():
        expected = moved(x)
        with pytest.warns(dynswap_ext.DynswapWarning, match="TORCH_CUDA_ARCH_LIST") as said:
            outputs = [model(x) for _ in range(3)]
    gpu.synchronise()
    testing.assert_bit_equal(outputs, [expected] * 3)
    assert len(said) == 1
    assert handle.stats().bytes_moved > 0


def test_a_device_without_kernels_needs_none(gpu: Gpu, recwarn: pytest.WarningsRecorder) -> None:
    pretend_cuda.faults().no_kernel_image = True
    model = Exact().eval()
    moved, _ = gpu.pair(model, torch.float32, budget=RING)
    x = gpu.whole_numbers(dtype=torch.float32)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
    assert not [each for each in recwarn if issubclass(each.category, dynswap_ext.DynswapWarning)]
