"""CUDA's rules for memory, copies and host functions, tested by calls of its own functions.

The functions are those of a GPU, or of the pretend device. Where the two differ, the test says why the
pretend device may.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from conftest import PRETEND, needs_cuda_runtime
from cuda_runtime import (
    ALREADY_REGISTERED,
    DEVICE,
    DEVICE_TO_HOST,
    HOST,
    INVALID_DIRECTION,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_READY,
    NOT_REGISTERED,
    PAGE,
    SUCCESS,
    UNREGISTERED,
    HostFunction,
    Runtime,
    busy,
    pages,
    seconds,
)

pytestmark = pytest.mark.device
DELAY = 200.0  # milliseconds
LONG = DELAY / 2000  # seconds: a call that waits takes longer, one that does not is over sooner


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    needs_cuda_runtime()
    yield Runtime()
    torch.cuda.synchronize()


def on_the_device(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device="cuda")


# Page-locking -------------------------------------------------------------------------------------------


def test_memory_is_registered_once(cuda: Runtime) -> None:
    _block, at = pages(2)
    codes = [cuda.register(at, 2 * PAGE), cuda.register(at, 2 * PAGE), cuda.register(at, PAGE)]
    codes += [cuda.unregister(at), cuda.unregister(at)]
    assert codes == [SUCCESS, ALREADY_REGISTERED, ALREADY_REGISTERED, SUCCESS, NOT_REGISTERED]


def test_ranges_may_not_overlap(cuda: Runtime) -> None:
    _block, at = pages(4)
    with cuda.registered(at + PAGE, 2 * PAGE):
        assert cuda.register(at, 2 * PAGE) == ALREADY_REGISTERED
        assert cuda.register(at, 4 * PAGE) == ALREADY_REGISTERED
        assert cuda.register(at + 2 * PAGE, 2 * PAGE) == ALREADY_REGISTERED


def test_neighbours_in_one_page(cuda: Runtime) -> None:
    """Two ranges in one page can be registered. The pretend driver locks whole pages, as older ones may."""
    _block, at = pages(1)
    with cuda.registered(at, 1024):
        code = cuda.register(at + 2048, 1024)
        assert code == (ALREADY_REGISTERED if PRETEND else SUCCESS)
        if code == SUCCESS:
            assert cuda.unregister(at + 2048) == SUCCESS


def test_a_registration_ends_by_its_first_byte(cuda: Runtime) -> None:
    _block, at = pages(2)
    with cuda.registered(at, 2 * PAGE):
        assert cuda.unregister(at + PAGE) == INVALID_VALUE


def test_nothing_is_not_registered(cuda: Runtime) -> None:
    _block, at = pages(1)
    assert cuda.register(at, 0) == INVALID_VALUE
    assert cuda.register(0, PAGE) == INVALID_VALUE


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_a_mapped_file(cuda: Runtime, kind: str, tmp_path: Path) -> None:
    """A mapped file may be refused. Linux 6.5 and later lock no pages that have to be written back."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    flags = mmap.MAP_PRIVATE if kind == "private" else mmap.MAP_SHARED
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=flags)
    view = torch.frombuffer(mapping, dtype=torch.uint8)
    code = cuda.register(view.data_ptr(), 4 * PAGE)
    if code == SUCCESS:
        assert cuda.unregister(view.data_ptr()) == SUCCESS
    assert code == (SUCCESS if kind == "private" else INVALID_VALUE)


def test_memory_that_may_only_be_read_is_not(cuda: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at = numpy.frombuffer(mapping, dtype=numpy.uint8).ctypes.data
    assert cuda.register(at, 4 * PAGE) != SUCCESS


def test_what_an_address_is(cuda: Runtime) -> None:
    _block, at = pages(3)
    assert cuda.kind_of(at) == UNREGISTERED
    with cuda.registered(at, 2 * PAGE):
        kinds = [cuda.kind_of(at + offset) for offset in (0, PAGE + 1, 2 * PAGE - 1, 2 * PAGE)]
        assert kinds == [HOST, HOST, HOST, UNREGISTERED]
    assert cuda.kind_of(at) == UNREGISTERED
    block = cuda.host_alloc(PAGE)
    assert [cuda.kind_of(block), cuda.kind_of(block + PAGE - 1)] == [HOST, HOST]
    assert cuda.free_host(block) == SUCCESS
    assert cuda.kind_of(on_the_device(64).data_ptr()) == DEVICE


def test_the_rest_of_a_page_is_not_page_locked(cuda: Runtime) -> None:
    _block, at = pages(1)
    with cuda.registered(at, 1024):
        assert cuda.kind_of(at + 2048) == (HOST if PRETEND else UNREGISTERED)  # pretend locks whole pages


def test_the_range_of_an_address(cuda: Runtime) -> None:
    _block, at = pages(4)
    assert cuda.range_of(at) == (0, 0)
    with cuda.registered(at, 2 * PAGE), cuda.registered(at + 2 * PAGE, 2 * PAGE):
        assert cuda.range_of(at + 2 * PAGE - 1) == (at, 2 * PAGE)
        assert cuda.range_of(at + 3 * PAGE) == (at + 2 * PAGE, 2 * PAGE)
    block = cuda.host_alloc(2 * PAGE)
    assert cuda.range_of(block + PAGE) == (block, 2 * PAGE)
    assert cuda.free_host(block) == SUCCESS
    pinned = torch.empty(3 * PAGE, dtype=torch.uint8).pin_memory()
    begin, size = cuda.range_of(pinned.data_ptr() + PAGE)  # torch rounds up
    assert begin <= pinned.data_ptr() and begin + size >= pinned.data_ptr() + 3 * PAGE


# Copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["registered too", "pageable"])
def test_a_copy_from_memory_of_two_registrations(cuda: Runtime, other: str) -> None:
    block, at = pages(4)
    block.fill_(3)
    there, stream = on_the_device(4 * PAGE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with cuda.registered(at, 2 * PAGE):
        if other == "pageable":
            code = cuda.copy(there.data_ptr(), at, 4 * PAGE, stream)
        else:
            with cuda.registered(at + 2 * PAGE, 2 * PAGE):
                code = cuda.copy(there.data_ptr(), at, 4 * PAGE, stream)
    assert code == INVALID_VALUE


def test_a_copy_of_nothing(cuda: Runtime) -> None:
    _block, at = pages(1)
    assert cuda.copy(on_the_device(64).data_ptr(), at, 0, torch.cuda.Stream()) == SUCCESS


def test_a_copy_in_the_wrong_direction(cuda: Runtime) -> None:
    __block, at = pages(1)
    there = on_the_device(64)
    code = cuda.copy(there.data_ptr(), at, 64, torch.cuda.Stream(), DEVICE_TO_HOST)
    assert code == (INVALID_DIRECTION if PRETEND else INVALID_VALUE)


@pytest.mark.parametrize("size", [16 << 10, 4 << 20], ids=["16 KiB", "4 MiB"])
@pytest.mark.parametrize("memory", ["pageable", "registered"])
def test_when_a_source_is_read(cuda: Runtime, memory: str, size: int) -> None:
    """Pageable memory is read before the call returns, page-locked memory when the copy's turn comes."""
    block, at = pages(size // PAGE)
    there, stream = on_the_device(size), torch.cuda.Stream()
    torch.cuda.synchronize()
    block.fill_(1)
    if memory == "registered":
        assert cuda.register(at, size) == SUCCESS
    busy(stream, DELAY)
    took = seconds(lambda: cuda.copy(there.data_ptr(), at, size, stream))
    block.fill_(2)
    torch.cuda.synchronize()
    if memory == "registered":
        assert cuda.unregister(at) == SUCCESS
    first, last = there[[0, -1]].tolist()
    assert (first, last) == ((2, 2) if memory == "registered" else (1, 1))
    if memory == "registered":
        assert took < LONG


def test_batches(cuda: Runtime) -> None:
    block, at = pages(4)
    block[:PAGE].fill_(1)
    block[PAGE:].fill_(2)
    there, stream = on_the_device(4 * PAGE), torch.cuda.Stream()
    torch.cuda.synchronize()
    copies = [(there.data_ptr(), at, PAGE), (there.data_ptr() + PAGE, at + PAGE, 3 * PAGE)]
    with cuda.registered(at, 4 * PAGE):
        assert cuda.batch(copies, stream.cuda_stream) == SUCCESS
        torch.cuda.synchronize()
        assert there[[0, PAGE - 1, PAGE, -1]].tolist() == [1, 1, 2, 2]
        assert cuda.batch(copies, 0) == INVALID_VALUE  # the legacy default stream
        assert cuda.batch([*copies, (there.data_ptr(), at, 0)], stream.cuda_stream) == INVALID_VALUE
        assert cuda.batch(copies, stream.cuda_stream, order=0) == INVALID_VALUE


# Events and streams -------------------------------------------------------------------------------------


def test_an_event_that_was_never_recorded_is_over(cuda: Runtime) -> None:
    event, stream = cuda.event(), torch.cuda.Stream()
    calls = [cuda.call("cudaEventQuery", event), cuda.call("cudaEventSynchronize", event)]
    calls += [cuda.call("cudaStreamWaitEvent", stream.cuda_stream, event, ctypes.c_uint(0))]
    assert calls == [SUCCESS] * 3
    assert cuda.call("cudaEventDestroy", event) == SUCCESS


def test_the_time_between_events(cuda: Runtime) -> None:
    stream = torch.cuda.Stream()
    first, last, untimed = cuda.event(), cuda.event(), cuda.event(timed=False)
    found = ctypes.c_float()

    def elapsed(end: int) -> int:
        return cuda.call("cudaEventElapsedTime", ctypes.byref(found), first, end)

    assert elapsed(last) == INVALID_HANDLE  # neither was recorded
    for event in (first, untimed):
        assert cuda.call("cudaEventRecord", event, stream.cuda_stream) == SUCCESS
    busy(stream, DELAY)
    assert cuda.call("cudaEventRecord", last, stream.cuda_stream) == SUCCESS
    assert elapsed(last) == NOT_READY
    stream.synchronize()
    assert elapsed(untimed) == INVALID_HANDLE
    assert elapsed(last) == SUCCESS
    assert found.value > 1000 * LONG
    for event in (first, last, untimed):
        cuda.call("cudaEventDestroy", event)


# What waits for queued work -----------------------------------------------------------------------------


def test_what_waits_for_the_device(cuda: Runtime) -> None:
    """To free page-locked memory waits for all queued work. None of the other calls here does."""
    stream = torch.cuda.Stream()
    _block, at = pages(1024)
    small, other = pages(4)
    ours, pending, allocated = cuda.stream(), cuda.event(), cuda.host_alloc(1 << 20)
    there = on_the_device(8 << 20)
    cuda.register(other, 4 * PAGE)
    new_block = ctypes.c_void_p()
    actions = {
        "cudaHostRegister": lambda: cuda.register(at, 1024 * PAGE),
        "cudaHostUnregister": lambda: cuda.unregister(other),
        "cudaHostAlloc": lambda: cuda.call(
            "cudaHostAlloc", ctypes.byref(new_block), 1 << 20, ctypes.c_uint(0)
        ),
        "cudaFreeHost": lambda: cuda.free_host(allocated),
        "cudaEventDestroy": lambda: cuda.call("cudaEventDestroy", pending),
        "cudaStreamDestroy": lambda: cuda.call("cudaStreamDestroy", ours),
        "cudaMemcpyAsync from pageable": lambda: cuda.copy(there.data_ptr(), small.data_ptr(), PAGE, stream),
        "cudaMemcpyAsync from registered": lambda: cuda.copy(there.data_ptr(), at, 1024 * PAGE, stream),
    }
    waits: set[str] = set()
    for name, action in actions.items():
        busy(stream, DELAY)
        cuda.call("cudaEventRecord", pending, stream.cuda_stream) if name == "cudaEventDestroy" else None
        if seconds(action) > LONG:
            waits.add(name)
        torch.cuda.synchronize()
    cuda.unregister(at)
    cuda.free_host(new_block.value or 0)
    assert waits == {"cudaFreeHost", "cudaHostUnregister"}


def test_what_waits_while_torch_allocates(cuda: Runtime) -> None:
    """cudaMalloc of a new segment does not wait, but freeing segments does."""
    stream = torch.cuda.Stream()
    torch.cuda.empty_cache()
    busy(stream, DELAY)
    allocating = seconds(lambda: torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    busy(stream, DELAY)
    giving_back = seconds(torch.cuda.empty_cache)
    assert allocating < LONG < giving_back


# Host functions -----------------------------------------------------------------------------------------


def test_a_host_function_that_blocks(cuda: Runtime) -> None:
    """While a host function blocks, copies and kernels of other streams go on, but host functions wait.

    Host functions share a thread. On the pretend device all work may stop, or may have run before, so no
    test may rely on anything else.
    """
    block, at = pages(16)
    block.fill_(5)
    there = on_the_device(16 * PAGE)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    release, second = threading.Event(), threading.Event()
    first_function = HostFunction(lambda _: bool(release.wait(2)) and None)
    second_function = HostFunction(lambda _: second.set())
    with cuda.registered(at, 16 * PAGE):
        assert cuda.call("cudaLaunchHostFunc", streams[0].cuda_stream, first_function, 0) == SUCCESS
        assert cuda.call("cudaLaunchHostFunc", streams[1].cuda_stream, second_function, 0) == SUCCESS
        assert cuda.copy(there.data_ptr(), at, 16 * PAGE, streams[2]) == SUCCESS
        with torch.cuda.stream(streams[3]):
            torch.ones(8, device="cuda")
        time.sleep(0.2)
        went_on = [second.is_set(), streams[2].query(), streams[3].query()]
        release.set()
        torch.cuda.synchronize()
    assert PRETEND or went_on == [False, True, True]


def test_a_host_function_calls_nothing(cuda: Runtime) -> None:
    if PRETEND:
        pytest.skip("there it is a violation")
    found: list[int] = []
    stream = torch.cuda.Stream()
    function = HostFunction(lambda _: found.append(cuda.call("cudaStreamQuery", stream.cuda_stream)))
    assert cuda.call("cudaLaunchHostFunc", stream.cuda_stream, function, 0) == SUCCESS
    stream.synchronize()
    assert found == [NOT_PERMITTED]
