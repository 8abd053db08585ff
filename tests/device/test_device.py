"""The pretend device shows the mistakes that a GPU punishes: each is made here, and has to show.

A program runs with several orders and seeds. If it makes the mistake, some run has to give wrong values;
without the mistake, none may.
"""

from __future__ import annotations

import gc
import mmap
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pretend_cuda
from conftest import only_cuda_has

if not pretend_cuda.active():
    pytest.skip("for the run on the pretend device (make test-cuda)", allow_module_level=True)

only_cuda_has("what is asked of the device through torch.cuda, and a CUDA runtime", whole_module=True)

pytestmark = pytest.mark.device
SEEDS = range(1, 6)
SIZE = 1 << 14


def runs(orders: tuple[str, ...] = ("late", "early", "mixed")) -> Iterator[str]:
    """Reset the device for each order and seed, and yield the run's name; reset it once more at the end."""
    for order in orders:
        for seed in SEEDS:
            pretend_cuda.reset(seed, order)
            yield f"{order}, seed {seed}"
    pretend_cuda.reset()


def wrong_runs(program: Callable[[], bool], *orders: str) -> list[str]:
    """Return the names of the runs in which the program's values were wrong."""
    return [run for run in (runs(orders) if orders else runs()) if not program()]


def is_all(tensor: Tensor, value: float) -> bool:
    torch.cuda.synchronize()
    return bool((tensor.cpu() == value).all())


# Order ------------------------------------------------------------------------------------------------


def ring_of_slots(waits: bool, write_after_read: bool) -> bool:
    """Pass eight weights through two slots. The reader waits for the copy, the next copy for the reader."""
    weights = [torch.full((SIZE,), float(i)).pin_memory() for i in range(8)]
    slots = [torch.empty(SIZE, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    copying, reading = torch.cuda.Stream(), torch.cuda.current_stream()
    read: list[torch.cuda.Event | None] = [None, None]
    found = []
    for number, weight in enumerate(weights):
        slot, last = slots[number % 2], read[number % 2]
        if last is not None and write_after_read:
            copying.wait_event(last)
        with torch.cuda.stream(copying):
            slot.copy_(weight, non_blocking=True)
            copied = copying.record_event()
        if waits:
            reading.wait_event(copied)
        found.append(slot + 1)
        read[number % 2] = reading.record_event()
    torch.cuda.synchronize()
    return all(is_all(each, number + 1) for number, each in enumerate(found))


def test_a_ring_of_slots() -> None:
    assert not wrong_runs(lambda: ring_of_slots(waits=True, write_after_read=True))


def test_a_ring_without_its_wait() -> None:
    """Only copies that are late show that the reader does not wait for them."""
    assert wrong_runs(lambda: ring_of_slots(waits=False, write_after_read=True))


def test_a_ring_without_its_write_after_read_event() -> None:
    assert wrong_runs(lambda: ring_of_slots(waits=True, write_after_read=False))


def test_an_event_recorded_again_moves_no_wait() -> None:
    first, second, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with pretend_cuda.virtual_clock(bytes_per_second=1e9):
        with torch.cuda.stream(first):
            value = torch.ones(SIZE, device="cuda")
            event.record()
        second.wait_event(event)
        with torch.cuda.stream(first):
            torch.cuda._sleep(1_000_000_000)
            event.record()
        with torch.cuda.stream(second):
            copy = value * 2
        second.synchronize()
        assert not event.query(), "the second stream waited for what was recorded after its wait"
        first.synchronize()
        assert event.query()
    assert is_all(copy, 2)


# Memory -----------------------------------------------------------------------------------------------


def used_on_another_stream(recorded: bool) -> bool:
    """Free a block while another stream reads it; return whether the stream read the right values."""
    side = torch.cuda.Stream()
    block = torch.ones(SIZE, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        result = block * 2
    if recorded:
        block.record_stream(side)
    del block
    torch.full((SIZE,), 5.0, device="cuda")
    return is_all(result, 2)


def test_a_block_is_freed_for_the_stream_that_reads_it() -> None:
    assert not wrong_runs(lambda: used_on_another_stream(recorded=True))


def test_a_block_is_freed_without_record_stream() -> None:
    assert wrong_runs(lambda: used_on_another_stream(recorded=False))


def test_freed_memory_is_poisoned() -> None:
    for _ in runs():
        block = torch.ones(SIZE, device="cuda")
        address = block.data_ptr()
        del block
        fresh = [torch.empty(SIZE, device="cuda") for _ in range(64)]
        again = next(each for each in fresh if each.data_ptr() == address)
        assert again.isnan().all().item()


READS = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import pretend_cuda
pretend_cuda.activate()
import torch
block = torch.ones(4096, device="cuda")
torch.cuda.synchronize()
assert block.cpu()[0] == 1
print("reads", flush=True)
ctypes.string_at(block.data_ptr(), 4)
"""


def test_the_host_cannot_read_device_memory() -> None:
    folder = str(Path(pretend_cuda.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", READS, folder], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "reads", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_memory_ends() -> None:
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# The host's memory ------------------------------------------------------------------------------------


def overwritten_source(waits: bool) -> bool:
    source = torch.ones(SIZE).pin_memory()
    there = torch.empty(SIZE, device="cuda")
    torch.cuda.synchronize()
    there.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    source.fill_(7)
    return is_all(there, 1)


def test_a_copy_reads_pinned_memory_when_it_runs() -> None:
    assert not wrong_runs(lambda: overwritten_source(waits=True))
    assert wrong_runs(lambda: overwritten_source(waits=False))


def arriving(waits: bool) -> bool:
    there = torch.ones(SIZE, device="cuda")
    here = torch.zeros(SIZE).pin_memory()
    torch.cuda.synchronize()
    here.copy_(there, non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    seen = here.clone()  # the device goes on meanwhile
    right = bool((seen == 1).all())
    assert (seen.isnan() | (seen == 1)).all(), "until it has come, memory holds poison and nothing else"
    torch.cuda.synchronize()
    return right


def test_what_comes_back_is_garbage_until_its_event() -> None:
    assert not wrong_runs(lambda: arriving(waits=True))
    assert wrong_runs(lambda: arriving(waits=False))


def anonymous(size: int) -> tuple[mmap.mmap, Tensor]:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return pages, torch.frombuffer(pages, dtype=torch.uint8)


def test_a_copy_may_not_span_registrations() -> None:
    _, block = anonymous(4 * mmap.PAGESIZE)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(block.data_ptr(), mmap.PAGESIZE, 0)) == 0
    assert int(cudart.cudaHostRegister(block.data_ptr(), mmap.PAGESIZE, 0)) != 0  # it is registered
    try:
        assert block[: mmap.PAGESIZE].cuda().sum().item() == 0
        with pytest.raises(RuntimeError, match="pinned"):
            block.cuda()
    finally:
        cudart.cudaHostUnregister(block.data_ptr())


def unmapped_while_registered(unregisters: bool) -> bool:
    pretend_cuda.watch_pages()
    _, block = anonymous(64 * mmap.PAGESIZE)
    address = block.data_ptr()
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(address, block.nbytes, 0)) == 0
    if unregisters:
        cudart.cudaHostUnregister(address)
    del block, _
    gc.collect()
    again = [anonymous(64 * mmap.PAGESIZE) for _ in range(4)]  # one of them may be at the same address
    if not unregisters:
        cudart.cudaHostUnregister(address)
    del again
    return not pretend_cuda.violations()


def test_registered_pages_stay_mapped() -> None:
    assert unmapped_while_registered(unregisters=True)
    assert not unmapped_while_registered(unregisters=False)
    pretend_cuda.reset()


# Devices and synchronisations -------------------------------------------------------------------------


def test_devices_do_not_mix() -> None:
    first, second, host = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1"), torch.ones(4)
    for left, right in ((first, second), (first, host), (host, second)):
        with pytest.raises(RuntimeError, match="same device"):
            left + right
        with pytest.raises(RuntimeError, match="same device"):
            torch.nn.functional.linear(left[None], right[None])
    assert is_all(first + torch.tensor(2.0), 3)  # a number may come from the host
    assert is_all(second.to("cuda:0") + first, 2)


SYNCHRONISES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "to the host": lambda x: x.cpu(),
    "from pageable memory, blocking": lambda x: x.copy_(torch.ones(SIZE)),
    "nonzero": lambda x: x.nonzero(),
    "device": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("what", SYNCHRONISES)
def test_a_synchronisation_can_be_forbidden(what: str) -> None:
    x = torch.ones(SIZE, device="cuda")
    before = pretend_cuda.counts()["synchronisations"]
    SYNCHRONISES[what](x)
    assert pretend_cuda.counts()["synchronisations"] > before
    with pretend_cuda.no_synchronisation(), pytest.raises(RuntimeError, match="synchronisation"):
        SYNCHRONISES[what](x)
    assert pretend_cuda.violations()
    pretend_cuda.reset()


def test_queued_work_is_no_synchronisation() -> None:
    source = torch.ones(SIZE).pin_memory()
    with pretend_cuda.no_synchronisation():
        there = source.to("cuda", non_blocking=True)
        result = (there * 2).sum()
        torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    assert result.item() == 2 * SIZE


def test_the_virtual_clock_tells_what_work_takes() -> None:
    size = 1 << 20
    here, there = torch.zeros(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8)
    there = there.to("cuda")
    copies = torch.cuda.Stream()
    begin, copied, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    with pretend_cuda.virtual_clock(bytes_per_second=size / 0.25):
        begin.record()
        with torch.cuda.stream(copies):
            there.copy_(here, non_blocking=True)
            there.copy_(here, non_blocking=True)
            copied.record()
        torch.cuda._sleep(int(0.1 * 2e9))
        assert not copied.query()
        torch.cuda.current_stream().wait_event(copied)
        there.add_(1)
        torch.cuda._sleep(int(0.2 * 2e9))
        end.record()
        end.synchronize()
        assert begin.elapsed_time(copied) == pytest.approx(500)
        assert begin.elapsed_time(end) == pytest.approx(700)
        assert copied.query()


def test_a_device_has_the_memory_that_it_is_given() -> None:
    torch.cuda.empty_cache()
    pretend_cuda.faults().memory_bytes = torch.cuda.memory_reserved() + (8 << 20)
    assert torch.cuda.mem_get_info() == (8 << 20, pretend_cuda.faults().memory_bytes)
    kept = torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="2 MiB is free"):
        torch.empty(6 << 20, dtype=torch.uint8, device="cuda")
    del kept


def test_work_that_is_dropped_is_counted_and_takes_no_effect() -> None:
    ones, target = torch.ones(SIZE).pin_memory(), torch.zeros(SIZE, device="cuda")
    events = [torch.cuda.Event() for _ in range(4)]
    with pretend_cuda.dropping_work(under_way=2):
        copies = pretend_cuda.counts()["copies"]
        target.copy_(ones, non_blocking=True)
        assert pretend_cuda.counts()["copies"] == copies + 1
        for event in events:
            event.record()
        assert [event.query() for event in events] == [True, True, False, False]
        events[3].synchronize()
        assert events[3].query()
    assert is_all(target, 0)
    target.copy_(ones, non_blocking=True)
    assert is_all(target, 1)
