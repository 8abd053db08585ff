"""A driver that answers with an error instead of doing what it is asked. Only the pretend device does."""

from __future__ import annotations

import pytest
import torch

import dynswap_ext
import pretend_cuda
from conftest import ENGINE, only_cuda_has
from dynswap_ext import _provider, testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu

RING = 3 * 2 * LAYER_BYTES
DELAY = 20.0  # milliseconds

#: No kernel was compiled for the device, and the driver cannot compile this build's PTX: the PTX is newer
#: than the driver (as with a new card and a new toolkit), or the driver has no compiler, or may not use it.
no_kernels = pytest.mark.parametrize(
    "code",
    [209, 218, 221, 222, 223],
    ids=["no image", "invalid PTX", "no compiler", "newer PTX", "compiler forbidden"],
)


@pytest.fixture(autouse=True)
def _pretend(gpu: Gpu) -> None:
    only_cuda_has("the errors of its driver")
    if not pretend_cuda.active():
        pytest.skip("a real driver does not answer so on request")
    if not gpu.native:
        pytest.skip("pure Python asks the driver nothing")


@pytest.mark.parametrize("code", [1, 400, 906], ids=["invalid value", "invalid handle", "capture implicit"])
def test_a_question_that_is_not_answered(gpu: Gpu, code: int) -> None:
    """An event whose query fails counts as not over: its slot is neither written nor read without a wait."""
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


@no_kernels
def test_a_device_for_which_no_kernel_was_compiled(gpu: Gpu, code: int) -> None:
    """Weights are cast on the host, with one warning."""
    if ENGINE == "torch":
        pytest.skip("torch has kernels of its own")
    pretend_cuda.faults().kernel_error = code
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


@no_kernels
def test_a_device_without_kernels_needs_none(gpu: Gpu, recwarn: pytest.WarningsRecorder, code: int) -> None:
    pretend_cuda.faults().kernel_error = code
    model = Exact().eval()
    moved, _ = gpu.pair(model, torch.float32, budget=RING)
    x = gpu.whole_numbers(dtype=torch.float32)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
    assert not [each for each in recwarn if issubclass(each.category, dynswap_ext.DynswapWarning)]


def test_a_driver_that_is_broken_is_named_with_the_call(gpu: Gpu) -> None:
    if ENGINE == "torch":
        pytest.skip("torch has kernels of its own")
    pretend_cuda.faults().kernel_error = 999
    with pytest.raises(
        dynswap_ext.errors.DeviceError, match=r"cudaErrorUnknown .* in cudaFuncGetAttributes with the cast"
    ):
        gpu.install(Exact(), budget=RING)


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [
        (35, "cudaErrorInsufficientDriver", "Update the NVIDIA driver, or reinstall the extension"),
        (100, "0 CUDA device", "CUDA_VISIBLE_DEVICES"),
        (802, "cudaErrorSystemNotReady", "nvidia-fabricmanager"),
        (999, "cudaErrorUnknown", "nvidia-smi"),
    ],
    ids=["old driver", "no device", "not ready", "unknown"],
)
def test_a_driver_that_serves_torch_alone(gpu: Gpu, code: int, name: str, remedy: str) -> None:
    """torch's streams copy if the extension's runtime cannot use the driver. A warning has the remedy."""
    if ENGINE == "torch":
        pytest.skip("torch's streams are asked for")
    _provider._warn_once.cache_clear()
    pretend_cuda.faults().device_count_error = code
    with pytest.warns(dynswap_ext.DynswapWarning, match=name) as said:
        gpu.install(Exact(), budget=RING)
    text = str(said[0].message)
    assert remedy in text and "through torch's own streams" in text
    # An older toolkit only helps with an older driver.
    assert ("Update the NVIDIA driver" in text) == (code == 35)


def test_a_write_on_a_lost_device_is_asked_for_once(gpu: Gpu) -> None:
    """A lost device raises torch's error once.

    Then masters, which are in RAM, can be read, and the install ends.
    """
    model = Exact().eval()
    # Not pinned: a runtime that has lost its device unlocks nothing, and later tests get the same memory.
    handle = gpu.install(model, dtype=torch.float64, budget=RING, host_budget="minimum")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(gpu.whole_numbers())
        held = model.layers[0].weight
        held[0].add_(1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.zeros(4, device=gpu.device)[torch.tensor([100], device=gpu.device)].cpu()
    with pytest.raises(RuntimeError, match="CUDA error"):
        model.state_dict()
    for name, value in model.state_dict().items():
        testing.assert_bit_equal(value, before[name], name)
    handle.uninstall()
    pretend_cuda.reset()
