"""The engine over torch's own streams, which serves accelerators without the CUDA backend."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext import checkpoint, testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu
from threads import repeated


@pytest.fixture(autouse=True)
def over_torchs_streams(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gpu.native:
        pytest.skip("pure Python has no engine")
    monkeypatch.setenv("DYNSWAP_ENGINE_BACKEND", "torch")


def test_a_file_that_cannot_be_read_any_more(gpu: Gpu, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    checkpoint.save(Exact(), path)
    model = checkpoint.load(Exact, path).eval()
    handle = gpu.install(model, budget=3 * LAYER_BYTES, prefetch=2)
    x = gpu.whole_numbers(dtype=torch.float32)
    with torch.no_grad():
        model(x)
        with path.open("r+b") as file:
            file.truncate(LAYER_BYTES)
        with pytest.raises(dynswap_ext.errors.SourceError, match=r"w\.safetensors"):
            model(x)
    handle.uninstall()


class Mixed(Exact):
    """Layers that are read from a file before they are copied, and layers that are copied at once."""

    def pin_every_other(self) -> None:
        for layer in list(self.layers)[::2]:
            layer.weight.data = layer.weight.detach().clone().pin_memory()


def test_a_plan_is_replaced_while_copies_wait_for_their_turn(gpu: Gpu, tmp_path: Path) -> None:
    """A plan can be replaced while a copy waits for an earlier one that is still being read from a file."""
    path = tmp_path / "w.safetensors"
    checkpoint.save(Mixed(), path)
    model = checkpoint.load(Mixed, path).eval()
    model.pin_every_other()
    moved, handle = gpu.pair(model, budget=3 * 2 * LAYER_BYTES)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
    gpu.synchronise()
    outputs: list[torch.Tensor] = []

    def run(_: int) -> None:
        with torch.no_grad():
            outputs.append(model(x))

    with repeated(run):
        for turn in range(1_000):
            if turn >= 12 and len(outputs) >= 2:  # on a busy machine the forwards begin late
                break
            handle.retune((3 + turn % 2) * 2 * LAYER_BYTES)
    gpu.synchronise()
    assert len(outputs) >= 2
    testing.assert_bit_equal(outputs, [expected] * len(outputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "read first"])
def test_casts_are_torchs(gpu: Gpu, dtype: torch.dtype, pinned: bool, tmp_path: Path) -> None:
    values = torch.cat([torch.randn(200_000) * 10.0**power for power in range(-6, 4)])
    values[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30, 500.0])
    master = nn.Module()
    master.register_buffer("values", values.pin_memory() if pinned else values)
    if not pinned:
        checkpoint.save(master, tmp_path / "w.safetensors")
        master = checkpoint.load(master, tmp_path / "w.safetensors")
    gpu.install(master, dtype=dtype)
    found, expected = master.values.clone(), values.to(gpu.device, dtype)
    assert found.isnan().tolist()[:1] == [True] and int(found.isnan().sum()) == 1
    testing.assert_bit_equal(found[1:], expected[1:])  # the bits of a cast NaN depend on the device


def test_a_refused_registration_is_said_once(gpu: Gpu) -> None:
    only_cuda_has("page-locking in place")
    if not pretend_cuda.active():
        pytest.skip("takes a runtime that can be told to refuse")
    pretend_cuda.faults().register_at_most = 0
    with pytest.warns(dynswap_ext.DynswapWarning, match="refused to page-lock") as caught:
        model = Exact().eval()
        handle = gpu.install(model)
        handle.retune()
    assert len([one for one in caught if "page-lock" in str(one.message)]) == 1
    assert pretend_cuda.last_error() == 0, "an innocent call would report it"


class Spread(Exact):
    """All layers read the input, the last one on its own stream. The eight before it are slow."""

    streams: tuple[Any, Any] | None = None

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        outputs, slow = [], len(self.layers) - 9
        for number, layer in enumerate(self.layers):
            last = number == len(self.layers) - 1
            with self.streams[last] if self.streams else nullcontext():
                if self.streams and slow <= number and not last:
                    torch.get_device_module(x.device)._sleep(1_000_000_000)
                outputs.append(layer(x))
        return outputs


def test_an_uninstall_while_copies_wait_for_readers_on_another_stream(gpu: Gpu, tmp_path: Path) -> None:
    """An uninstall drops copies that wait for readers, whose memory is free for others afterwards."""
    if not pretend_cuda.active():
        pytest.skip("takes a device whose queued work can be late")
    path, width = tmp_path / "w.safetensors", 512
    checkpoint.save(Spread(24, width), path)
    budget = 9 * width * width * 4
    x = gpu.whole_numbers(dtype=torch.float32, width=width)
    for seed in range(1, 6):
        pretend_cuda.reset(seed, "mixed")
        model = checkpoint.load(lambda: Spread(24, width), path).eval()
        moved, handle = gpu.pair(model, torch.float32, budget=budget, prefetch=8)
        with torch.no_grad():
            expected = moved(x)
            model(x)
            gpu.synchronise()
            model.streams = gpu.new_stream(), gpu.new_stream()
            outputs = model(x)
        handle.uninstall()
        others = [torch.full((budget // 4,), float("nan"), device=gpu.device) for _ in range(3)]
        gpu.synchronise()
        testing.assert_bit_equal(outputs, expected)
        del others, moved, expected, outputs
