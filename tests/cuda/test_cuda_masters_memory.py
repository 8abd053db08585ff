"""Page-locking ends before the memory does, and covers no memory but that of the masters."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pretend_cuda
from conftest import only_cuda_has
from dynswap_ext import testing
from dynswap_ext._util.shared_segment import MappedSegments
from dynswap_ext.sharing.outline import places_of
from dynswap_ext.sharing.segment import Segment
from gpu_under_test import WIDTH, Exact, Gpu

M_MMAP_THRESHOLD = -3
OWN_PAGES, HEAP = 1 << 16, 32 << 20


@pytest.fixture
def allocate_from() -> Iterator[Callable[[int], None]]:
    """Yield a function that sets the size from which the C library gives an allocation its own pages."""
    mallopt = ctypes.CDLL(None).mallopt
    yield lambda size: mallopt(M_MMAP_THRESHOLD, size)
    mallopt(M_MMAP_THRESHOLD, OWN_PAGES)


@pytest.fixture(autouse=True)
def _native(gpu: Gpu, allocate_from: Callable[[int], None]) -> None:
    if not gpu.native:
        pytest.skip("pure Python does not page-lock")
    allocate_from(OWN_PAGES)


def registered() -> int | None:
    """Return the bytes that are page-locked in place; None on a GPU, where this is unknown."""
    return pretend_cuda.counts()["registered_bytes"] if pretend_cuda.active() else None


def right(gpu: Gpu, model: nn.Module, seed: int = 0) -> None:
    """Assert that the installed model computes with its present masters."""
    moved = testing.moved(model, gpu.device, torch.float64)
    x = gpu.whole_numbers(seed=seed)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))


def replace_data(p: nn.Parameter) -> None:
    p.data = -p.data


def share(p: nn.Parameter) -> None:
    p.data.share_memory_()


def empty_and_fill(p: nn.Parameter) -> None:
    """Free a master's memory for a while, then give it other values."""
    values, storage = -p.detach(), p.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    others = torch.full_like(values, 3.0)  # likely where the master was
    storage.resize_(size)
    with torch.no_grad():
        p.copy_(values)
    del others


@pytest.mark.parametrize("change", [replace_data, share, empty_and_fill])
@pytest.mark.parametrize("budget", [None, "24MiB"])
def test_memory_that_a_master_lets_go_of(
    gpu: Gpu, change: Callable[[nn.Parameter], None], budget: str | None
) -> None:
    model = Exact().eval()
    handle = gpu.install(model, dtype=torch.float64, budget=budget)
    before = registered()
    with torch.no_grad():
        for p in list(model.parameters())[::2]:
            model(gpu.whole_numbers())  # the next are prefetched meanwhile
            change(p)
            right(gpu, model)
    for _ in range(2):
        right(gpu, model)
    if before is not None:  # only memory of masters is locked
        masters = sum(p.nbytes for p in model.parameters() if p.is_pinned())
        assert masters <= (registered() or 0) <= before
    handle.uninstall()
    assert not registered()
    assert not any(p.is_pinned() for p in model.parameters())


def test_memory_that_ranks_share_is_page_locked_where_it_is(gpu: Gpu) -> None:
    model = Exact().eval().requires_grad_(False)
    segment = Segment(places_of(model, []))
    segment.map(segment.make())
    segment.fill(True)
    segment.close()
    places = [p.data_ptr() for p in model.parameters()]
    handle = gpu.install(model, dtype=torch.float64)
    if pretend_cuda.active():
        assert registered() == sum(p.nbytes for p in model.parameters())
    assert all(p.is_pinned() for p in model.parameters())
    for _ in range(2):
        right(gpu, model)
    with torch.no_grad():
        for p in model.parameters():
            p.neg_()
    right(gpu, model)
    assert [p.data_ptr() for p in model.parameters()] == places
    handle.uninstall()
    assert not registered()
    assert not any(p.is_pinned() for p in model.parameters())
    assert len(MappedSegments()) > 0
    del model, handle, p, segment
    gc.collect()
    assert len(MappedSegments()) == 0


def test_what_torch_copies_stays_page_locked_until_it_is_copied(gpu: Gpu) -> None:
    """Another thread ends the install meanwhile, whose engine knows nothing of the copy."""
    model = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    master = model.weight
    before = master.double()
    handle = gpu.install(model, dtype=torch.float64)
    read: list[torch.Tensor] = []

    def read_late() -> None:
        gpu.delay(400)  # the copy waits behind it
        read.append(model.weight)

    with forward_ad.dual_level():
        master.copy_(forward_ad.make_dual(master.clone(), torch.ones_like(master)))  # torch copies such ones
        thread = threading.Thread(target=read_late)
        thread.start()
        time.sleep(0.1)
        handle.uninstall()
        assert master.is_pinned() or read
        thread.join()
    testing.assert_bit_equal(read[0].cpu(), before)
    assert not registered()


class Stack(nn.Module):
    """Experts of which a forward reads two, and keeps what it was handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.up = nn.Parameter(torch.randn(8, WIDTH, WIDTH), requires_grad=False)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.up]
        return x @ self.kept[0][1] @ self.kept[0][3]


def test_what_an_earlier_install_s_experts_copy_stays_page_locked_until_it_is_copied(gpu: Gpu) -> None:
    model = Stack()
    before = model.up.detach().clone()
    options = {"dtype": torch.float32, "prefetch": 0, "budget": 3 * WIDTH * WIDTH * 4}
    gpu.install(model, **options)
    model(torch.randn(2, WIDTH, device=gpu.device))
    (held,) = model.kept
    assert type(held) is not torch.Tensor  # it is served by slices
    handle = gpu.install(model, **options)
    if pretend_cuda.active():
        pretend_cuda.faults().unpinning_waits = False
    read: list[torch.Tensor] = []

    def read_late() -> None:
        gpu.delay(400)  # the copy waits behind it
        read.append(held + 0)

    thread = threading.Thread(target=read_late)
    thread.start()
    time.sleep(0.1)
    handle.uninstall()
    thread.join()
    testing.assert_bit_equal(read[0].cpu(), before)
    assert not registered()


def test_what_comes_to_the_same_address_is_copied_as_it_is(gpu: Gpu) -> None:
    model = Exact(layers=3).eval()
    gpu.install(model, dtype=torch.float64)
    right(gpu, model)
    for round_ in range(4):
        for p in model.parameters():
            size = p.nbytes
            p.data = torch.randint(-1, 2, p.shape).float()
            right(gpu, model)
            others = [torch.full((size // 4,), float(round_)) for _ in range(3)]
            for other in others:
                there = other.to(gpu.device, non_blocking=True)
                testing.assert_bit_equal(there.cpu(), other)
            del others


def test_replaced_masters_are_locked_at_the_next_pass(gpu: Gpu) -> None:
    only_cuda_has("locks in place")
    model = Exact(layers=3).eval()
    gpu.install(model, dtype=torch.float64)
    right(gpu, model)
    assert all(p.is_pinned() for p in model.parameters())
    for p in model.parameters():
        p.data = -p.data
    right(gpu, model)
    right(gpu, model)
    assert all(p.is_pinned() for p in model.parameters())
    model.load_state_dict({k: -v.clone() for k, v in model.state_dict().items()}, assign=True)
    right(gpu, model)
    right(gpu, model)
    assert all(p.is_pinned() for p in model.parameters())


def test_neighbours_on_a_page_can_be_copied_by_anybody(
    gpu: Gpu, allocate_from: Callable[[int], None]
) -> None:
    """Tensors of other code can be copied, though they share the heap's pages with masters."""
    allocate_from(HEAP)
    foreign, layers = [], []
    for i in range(8):
        foreign.append(torch.full((40_000 + 8 * i,), float(i)))
        layers.append(nn.Linear(200 + i, 200 + i + 1))
    foreign.append(torch.ones(50_000))
    model = nn.Sequential(*layers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the driver locks whole pages, these masters are not locked
        gpu.install(model, dtype=torch.float64)
    x = torch.ones(2, 200, dtype=torch.float64, device=gpu.device)
    with torch.no_grad():
        for _ in range(2):
            expected = testing.moved(model, gpu.device, torch.float64)(x)  # each master as a whole
            testing.assert_bit_equal(model(x), expected)
            for tensor in foreign:
                testing.assert_bit_equal(tensor.to(gpu.device, non_blocking=True).cpu(), tensor)


def test_masters_that_share_pages_are_named_with_the_remedy(
    gpu: Gpu, allocate_from: Callable[[int], None]
) -> None:
    only_cuda_has("locks in place")
    if not pretend_cuda.active():
        pytest.skip("whether a GPU's driver locks whole pages is its own affair")
    allocate_from(HEAP)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    with pytest.warns(UserWarning, match="MALLOC_MMAP_THRESHOLD_") as caught:
        handle = gpu.install(model, dtype=torch.float64)
    assert len(caught) == 1
    assert {group.source for group in handle.report().rows} <= {"RAM", "pinned RAM"}
    handle.uninstall()


@pytest.mark.parametrize("how", ["pin_memory", "register"])
def test_what_the_user_has_locked_is_read_where_it_is(gpu: Gpu, how: str) -> None:
    model = Exact(layers=3).eval()
    if how == "register":
        only_cuda_has("torch.cuda.cudart()")
    cudart = torch.cuda.cudart() if how == "register" else None
    for p in model.parameters():
        if how == "pin_memory":
            p.data = p.data.pin_memory()
        elif cudart is None or pretend_cuda.active():
            pytest.skip("there is no torch.cuda.cudart() here")
        else:
            assert int(cudart.cudaHostRegister(p.data_ptr(), p.nbytes, 0)) == 0
    before = registered()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What a driver allocates is no ordinary memory: the kernel does not track the writes to it.
        warnings.filterwarnings("default", message="the kernel does not track writes to some masters")
        handle = gpu.install(model, dtype=torch.float64)
    assert registered() == before
    right(gpu, model)
    assert all(group.source == "pinned RAM" for group in handle.report().rows)
    handle.uninstall()
    assert all(p.is_pinned() for p in model.parameters())
    if how == "register" and cudart is not None:
        for p in model.parameters():
            cudart.cudaHostUnregister(p.data_ptr())


@pytest.mark.parametrize("state", ["as saved", "written", "replaced", "deleted"])
def test_files_are_never_locked(gpu: Gpu, tmp_path: Path, state: str) -> None:
    """Mapped files are never page-locked, which would read them into memory as a whole.

    This holds even if they have to be read through their mapping.
    """
    model = Exact(layers=3).eval()
    path = tmp_path / "model.pt"
    testing.map_from_file(model, path)
    if state == "written":
        with torch.no_grad():
            next(model.parameters()).neg_()
    elif state == "replaced":
        other = tmp_path / "other"
        other.write_bytes(b"x" * path.stat().st_size)
        other.replace(path)
    elif state == "deleted":
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpu.install(model, dtype=torch.float64)
    right(gpu, model)
    assert not any(p.is_pinned() for p in model.parameters())
    assert not registered()


def test_a_storage_is_as_before_afterwards(gpu: Gpu) -> None:
    model = Exact(layers=3).eval()
    parameters = list(model.parameters())
    storages = [p.untyped_storage() for p in parameters]
    before = [
        (p.data_ptr(), p.is_shared(), s.nbytes(), s.resizable())
        for p, s in zip(parameters, storages, strict=True)
    ]
    handle = gpu.install(model, dtype=torch.float64)
    right(gpu, model)
    during = [
        (p.data_ptr(), p.is_shared(), s.nbytes(), s.resizable())
        for p, s in zip(parameters, storages, strict=True)
    ]
    handle.uninstall()
    after = [
        (p.data_ptr(), p.is_shared(), s.nbytes(), s.resizable())
        for p, s in zip(parameters, storages, strict=True)
    ]
    assert before == during == after
    for p in parameters:
        p.data.share_memory_()
        assert p.is_shared()


def test_small_masters_are_seen_as_they_are(gpu: Gpu) -> None:
    """Each copy of a small master has its present values, also after a write that bumps no version."""
    model = nn.Sequential(*(nn.Linear(1152, 1152) for _ in range(6))).eval()
    gpu.install(model, dtype=torch.float64, prefetch=0)  # nothing is read before the write
    for i in range(3):
        right(gpu, model)
        gpu.synchronise()
        for layer in model:
            layer.get_parameter("bias").data[37 + i] = float(i)
    right(gpu, model)


def test_locking_lets_other_threads_run(gpu: Gpu) -> None:
    only_cuda_has("locks in place")
    if not pretend_cuda.active():
        pytest.skip("how long a GPU's driver takes cannot be chosen")
    pretend_cuda.faults().registration_ms = 100
    model = Exact(layers=4).eval()
    turns, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal turns
        while not stop.is_set():
            time.sleep(0.001)
            turns += 1

    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.monotonic()
    handle = gpu.install(model, dtype=torch.float64)
    took, turns_meanwhile = time.monotonic() - begin, turns
    handle.uninstall()
    stop.set()
    thread.join()
    assert took > 0.4
    assert turns_meanwhile > 40  # if locking kept the GIL, there would be only a few


def test_locking_beside_threads_that_run_the_model(gpu: Gpu) -> None:
    """Masters are replaced, and locked again, while another thread computes with another install of them."""
    models = [Exact(layers=3).eval() for _ in range(2)]
    for left, right_layer in zip(models[0].layers, models[1].layers, strict=True):
        right_layer.weight = left.weight
    moved = testing.moved(models[0], gpu.device, torch.float64)
    gpu.install(models[0], dtype=torch.float64)
    x = gpu.whole_numbers()
    with torch.no_grad():
        expected = moved(x)
    failed: list[str] = []

    def install_and_leave() -> None:
        with torch.no_grad():
            for _ in range(5):
                handle = gpu.install(models[1], dtype=torch.float64)
                if not torch.equal(models[1](x), expected):
                    failed.append("the second install")
                handle.uninstall()

    thread = threading.Thread(target=install_and_leave)
    thread.start()
    with torch.no_grad():
        while thread.is_alive():
            if not torch.equal(models[0](x), expected):
                failed.append("the first install")
    thread.join()
    assert not failed
    if gpu.device.type == "cuda":
        assert all(p.is_pinned() for p in models[0].parameters())
