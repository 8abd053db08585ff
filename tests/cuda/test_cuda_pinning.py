"""Masters in RAM are page-locked in place during an install, and as before after it."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import only_cuda_has
from cuda_runtime import PAGE, SUCCESS, Runtime, pages
from dynswap_ext import config, testing
from gpu_under_test import LAYER_BYTES, Exact, Gpu

DELAY = 50.0  # milliseconds


def pinned(model: nn.Module) -> list[bool]:
    torch.empty(1).pin_memory()  # before the first such call, torch takes no memory as pinned
    return [p.is_pinned() for p in model.parameters()]


@pytest.mark.parametrize("pin", [True, False])
def test_masters_are_locked_in_place(gpu: Gpu, pin: bool) -> None:
    only_cuda_has("page-locking in place")
    if not gpu.native and not pin:
        pytest.skip("pure Python does not page-lock, whatever it is told")
    model = Exact().eval()
    addresses = [p.data_ptr() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    moved, handle = gpu.pair(model, host_budget="auto" if pin else "minimum")
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    if gpu.native:
        assert all(pinned(model)) if pin else not any(pinned(model))
    handle.uninstall()
    assert not any(pinned(model))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    testing.assert_bit_equal([p.detach() for p in model.parameters()], values)


def test_what_may_be_page_locked_is_not_exceeded(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    only_cuda_has("locks in place")
    monkeypatch.setattr(config, "ram_limit", lambda: int(2.5 * LAYER_BYTES / 0.8))
    model = Exact(layers=4).eval()
    moved, handle = gpu.pair(model)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
    if gpu.native:
        assert sum(pinned(model)) == 2
        stats = handle.stats()
        assert stats.pinned_bytes == 2 * LAYER_BYTES
        assert stats.staged_bytes == 2 * LAYER_BYTES
        assert stats.mapped_bytes == 0
        assert "page-locked, " in str(handle.report())
    handle.uninstall()
    assert handle.stats().pinned_bytes == 0
    assert not any(pinned(model))


def in_pages(model: Exact) -> list[int]:
    """Give masters pages of their own; return their addresses."""
    addresses = []
    for master in model.parameters():
        block, at = pages(LAYER_BYTES // PAGE)
        addresses.append(at)
        values = block.view(torch.float32).view(master.shape)
        master.data = values.copy_(master.detach())
    return addresses


@pytest.mark.parametrize(
    "quarters", [[(0, 2), (2, 2)], [(1, 2)], [(0, 1)], [(3, 1)]], ids=["halves", "middle", "first", "last"]
)
def test_masters_that_others_locked_in_pieces(gpu: Gpu, quarters: list[tuple[int, int]]) -> None:
    """Masters that other code has locked in two pieces are staged, as a copy may not span registrations.

    Plain torch cannot move them at all.
    """
    only_cuda_has("page-locking in place")
    if not gpu.native:
        pytest.skip("torch's own copies, which are refused")
    model = Exact(layers=3).eval()
    moved = testing.moved(model, gpu.device, torch.float64)
    runtime, blocks = Runtime(), in_pages(model)
    pieces = [
        (at + first * LAYER_BYTES // 4, count * LAYER_BYTES // 4)
        for at in blocks
        for first, count in quarters
    ]
    for piece, size in pieces:
        assert runtime.register(piece, size) == SUCCESS
    with pytest.warns(dynswap_ext.DynswapWarning, match=r"15.19 MiB.*page-locked in part"):
        handle = gpu.install(model, dtype=torch.float64)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().staged_bytes == 3 * LAYER_BYTES
    assert handle.stats().pinned_bytes == 0
    handle.uninstall()
    assert [runtime.unregister(piece) for piece, _ in pieces] == [SUCCESS] * len(pieces)


def test_masters_that_others_lock_otherwise_after_the_install(gpu: Gpu) -> None:
    """The error of a copy from memory that was locked again by other code has a remedy that works."""
    only_cuda_has("page-locking in place")
    if gpu.provider.expected_backend != "cuda":
        pytest.skip("torch's own copies, whose error is torch's")
    model = Exact(layers=3).eval()
    moved, x = testing.moved(model, gpu.device, torch.float64), gpu.whole_numbers()
    runtime, blocks = Runtime(), in_pages(model)
    for at in blocks:
        assert runtime.register(at, LAYER_BYTES) == SUCCESS
    gpu.install(model, dtype=torch.float64)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
        gpu.synchronise()
        for at in blocks:
            assert runtime.unregister(at) == SUCCESS
            for piece in (at, at + LAYER_BYTES // 2):
                assert runtime.register(piece, LAYER_BYTES // 2) == SUCCESS
        with pytest.raises(dynswap_ext.DeviceError, match="install the model again"):
            model(x)
        with pytest.warns(dynswap_ext.DynswapWarning, match="page-locked in part"):
            handle = gpu.install(model, dtype=torch.float64)
        testing.assert_bit_equal(model(x), moved(x))
        handle.uninstall()
    for at in blocks:
        assert [runtime.unregister(piece) for piece in (at, at + LAYER_BYTES // 2)] == [SUCCESS] * 2


@pytest.mark.parametrize("way", ["not page-locked", "waits", "blocking"])
def test_a_copy_of_a_master_to_the_device_before_a_step(gpu: Gpu, way: str) -> None:
    """A program's `non_blocking` copy of a master needs a wait before a step, or `host_budget="minimum"`.

    Pageable memory is read before the copy returns, page-locked memory when the copy's turn comes. So an
    average on the GPU that is copied like this may read new values. The remedies are in troubleshooting.md.
    """
    only_cuda_has("page-locking in place")
    model = Exact(layers=3)
    gpu.install(model, dtype=None, host_budget="minimum" if way == "not page-locked" else "auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(gpu.whole_numbers(dtype=torch.float32)).square().sum().backward()
    masters = list(model.parameters())
    before = [p.detach().clone() for p in masters]
    averages = [torch.zeros_like(p, device=gpu.device) for p in masters]
    gpu.synchronise()
    gpu.delay(DELAY)
    with torch.no_grad():
        for average, master in zip(averages, masters, strict=True):
            average.copy_(master, non_blocking=way != "blocking")
    if way == "waits":
        gpu.done()
    optimizer.step()
    gpu.synchronise()
    testing.assert_bit_equal([average.cpu() for average in averages], before)
    assert not torch.equal(masters[0].detach(), before[0])


def test_two_models_share_masters(gpu: Gpu) -> None:
    """Shared masters stay locked until the last of two installs ends."""
    only_cuda_has("page-locking in place")
    models = [Exact(layers=3).eval() for _ in range(2)]
    for left, right in zip(models[0].layers, models[1].layers, strict=True):
        right.weight = left.weight
    moved, first = gpu.pair(models[0])
    second = gpu.install(models[1], dtype=torch.float64)
    x = gpu.whole_numbers()
    with torch.no_grad():
        for model in models:
            testing.assert_bit_equal(model(x), moved(x))
        first.uninstall()
        if gpu.native:
            assert all(pinned(models[1]))
        testing.assert_bit_equal(models[1](x), moved(x))
    second.uninstall()
    assert not any(pinned(models[1]))


def test_a_replaced_master_is_streamed_from_its_new_place(gpu: Gpu) -> None:
    model = Exact(layers=3).eval()
    gpu.pair(model)
    x = gpu.whole_numbers()
    with torch.no_grad():
        model(x)
        for p in model.parameters():
            p.data = -p.data
        moved = testing.moved(model, gpu.device, torch.float64)
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))


def test_errors_of_a_refused_registration_are_not_left_behind(gpu: Gpu) -> None:
    """Memory that cannot be locked (here the user has locked it) is streamed, and leaves no error behind."""
    only_cuda_has("page-locking in place")
    model = Exact(layers=3).eval()
    cudart = torch.cuda.cudart()
    masters = list(model.parameters())
    for p in masters:  # onto whole pages of their own, which the user locks
        pages = torch.frombuffer(mmap.mmap(-1, p.nbytes), dtype=p.dtype).view_as(p)
        p.data = pages.copy_(p.detach())
        assert int(cudart.cudaHostRegister(p.data_ptr(), p.nbytes, 0)) == 0
    try:
        moved, handle = gpu.pair(model)
        x = gpu.whole_numbers()
        with torch.no_grad():
            for _ in range(2):
                testing.assert_bit_equal(model(x), moved(x))
        handle.uninstall()
        gpu.synchronise()  # would raise an error that was left behind
        assert all(p.is_pinned() for p in masters)
    finally:
        for p in masters:
            cudart.cudaHostUnregister(p.data_ptr())
