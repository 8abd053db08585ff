"""budget="auto" and Handle.retune: passes are measured, and this decides which weights stay."""

from __future__ import annotations

import gc
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import dynswap_ext
import pretend_cuda
from conftest import Provider
from dynswap_ext import ConfigError, _rounds, _tuning, testing
from dynswap_ext._util import memory, peak_memory
from sample_models import mlp

pytestmark = pytest.mark.alone

#: Wide enough for each layer to be copied by itself (a group).
WIDTH, LAYERS = 768, 12
#: Bytes of one layer (weight and bias) in float64, what alignment may add, and the whole model.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
SLACK = LAYERS * 4096
MODEL = LAYERS * LAYER
#: Calls until a new plan is used: one that is not measured, two that are, and the first with the plan.
CALLS = 4


def model_of_layers() -> nn.Sequential:
    return mlp(WIDTH, LAYERS).eval()


def last_layer(model: nn.Module) -> nn.Linear:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]


@dataclass
class Room:
    """A device with a given amount of memory for weights and activations."""

    provider: Provider
    monkeypatch: pytest.MonkeyPatch
    status: Path
    size: int = 0
    others: int = 0

    def leave(self, size: int) -> None:
        self.size = size
        if self.provider.device.type != "cpu":
            if not pretend_cuda.active():
                pytest.skip("the memory of a true device is what it is")
            gc.collect()
            self.provider.device_module.synchronize()
            self.provider.device_module.empty_cache()
            self.others = self.provider.device_module.memory_allocated()
            of_all = 1.0 - _tuning._KEPT_FREE_ON_ACCELERATORS
            pretend_cuda.faults().memory_bytes = int((self.others + size) / of_all) + 1
            return
        # The system's figures of the machine and of this process.
        self.monkeypatch.setattr(_tuning, "all_bytes", lambda device: 0)
        self.monkeypatch.setattr(memory, "_free_ram", lambda: size - self._held())
        self.monkeypatch.setattr(peak_memory, "_PROCESS", self.status.parent)
        self.process_takes(0, 0)

    def process_takes(self, now: int, most: int) -> None:
        self.status.write_text(f"VmHWM:\t{most // 1024} kB\nVmRSS:\t{now // 1024} kB\n", encoding="ascii")

    def is_all_given(self, handle: dynswap_ext.Handle) -> bool:
        """Return whether budget, activations and the device memory of casts take all the room there is.

        When the budget was found, casts may have had up to 16 MiB; they manage with less.
        """
        assert handle.budget is not None and handle.tuning is not None
        casts, more_for_casts = 0, 0
        if self.provider.device.type != "cpu":
            casts = self.provider.device_module.memory_allocated() - self.others - self._held()
        if self.provider.device.type != "cpu" and self.provider.native:
            more_for_casts = max(0, (16 << 20) - casts)
        left = self.size - handle.budget - int(1.1 * handle.tuning.activation_bytes) - casts
        inputs_and_outputs = 1 << 16
        return -inputs_and_outputs < left < more_for_casts + inputs_and_outputs

    def _held(self) -> int:
        held = [handle.stats() for handle in self.provider.handles if handle.active]
        return sum(stats.resident_bytes + stats.arena_bytes for stats in held)


@pytest.fixture
def room(provider: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Room:
    return Room(provider, monkeypatch, tmp_path / "status")


def test_a_model_that_fits_stays_whole(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget="auto")
    assert handle.tuning is None and handle.budget is not None
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
        tuning = handle.tuning
        assert tuning is not None and tuning.passes == 2
        assert tuning.budget == handle.budget is not None and tuning.budget >= MODEL
        assert tuning.compute_seconds > 0
        testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert stats.resident_groups == stats.groups and stats.bytes_moved == 0


def test_the_budget_is_what_the_passes_leave(provider: Provider, room: Room) -> None:
    model = model_of_layers()
    moved = testing.moved(model, provider.device, torch.float64)
    size = 10 * LAYER + SLACK
    room.leave(size)
    handle = provider.install(model, dtype=torch.float64, budget="auto")
    assert handle.budget is not None
    assert size // 2 <= handle.budget < 0.6 * size  # until the activations are known
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS + 2):
            testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert room.is_all_given(handle)
    assert stats.resident_bytes >= 2 * LAYER and stats.peak_bytes <= size and stats.overflow_bytes == 0
    streamed = (stats.weight_bytes - stats.resident_bytes) // 2
    assert 0 < stats.bytes_moved <= 3 * streamed + 3 * LAYER


class TakesMemory(nn.Module):
    """Takes memory in the middle of a call."""

    def __init__(self, take: Callable[[], object]) -> None:
        super().__init__()
        self.layers = model_of_layers()
        self.take = take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = self.take()
        x = self.layers(x)
        del taken
        return x


def test_activations_are_left_room(provider: Provider, room: Room) -> None:
    activations, size = 2 * LAYER, 9 * LAYER + SLACK

    def take() -> object:
        if provider.device.type == "cpu":
            return room.process_takes(0, activations)
        return torch.empty(activations, dtype=torch.uint8, device=provider.device)

    model = TakesMemory(take).eval()
    room.leave(size)
    handle = provider.install(model, dtype=torch.float64, budget="auto")
    with torch.no_grad():
        for _ in range(3 * CALLS):  # on a device, residents may give way to the first activations and casts
            model(provider.randn(2, WIDTH))
    assert room.is_all_given(handle)
    assert handle.tuning is not None
    # Copies of the pure-Python provider count as activations, and so do the sources of torch's casts.
    copies = {"python": 2 * LAYER, "torch": LAYER // 2}.get(provider.expected_backend, 0)
    assert activations <= handle.tuning.activation_bytes < activations + copies + (1 << 18)


def test_peak_memory_sees_what_is_over(provider: Provider) -> None:
    size = 64 << 20
    peak = _tuning.PeakMemory(provider.device)
    before = peak.more()
    if provider.device.type == "cpu":  # new memory, not from the heap that the process has
        with mmap.mmap(-1, size) as memory:
            memory.write(b"1" * size)
    else:
        torch.ones(size, dtype=torch.uint8, device=provider.device)
    # The kernel counts the resident set in batches of pages, and other threads take memory too.
    assert 0.9 * size <= peak.more() - before < 3 * size


class Slow(nn.Module):
    """A layer that waits before it computes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if not x.is_cpu:
            torch.get_device_module(x.device)._sleep(int(self.seconds * 2e9))  # cycles
        else:
            time.sleep(self.seconds)
        return torch.tanh(nn.functional.linear(x, weight, bias))


def slow_then_quick() -> nn.Sequential:
    """Return layers of which the slow ones hide any copy behind compute, and the quick ones hide none."""
    return nn.Sequential(*(Slow(0.05) for _ in range(6)), *(Slow(0.0) for _ in range(18))).eval()


def test_retune_never_foresees_a_slower_pass(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("the pure-Python provider copies when a weight is needed: any resident saves as much")
    model = slow_then_quick()
    moved, handle = provider.pair(model, budget=7 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    handle.retune()
    with torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
    tuning = handle.tuning
    assert tuning is not None and tuning.seconds_before is not None and tuning.seconds_after is not None
    assert tuning.seconds_after <= 1.001 * tuning.seconds_before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_residents_are_those_that_save_the_time_that_was_foreseen(
    provider: Provider, dtype: torch.dtype
) -> None:
    if not provider.native or not pretend_cuda.active():
        pytest.skip("what copies and layers take is known on the virtual clock of the pretend device alone")
    model = slow_then_quick()
    moved, handle = provider.pair(model, dtype, budget=7 * LAYER * dtype.itemsize // 8 + SLACK)
    x = provider.randn(2, WIDTH, dtype=dtype)
    with torch.no_grad():
        expected = moved(x)
    handle.retune()
    # A layer's copy takes a tenth of a slow layer's time.
    with pretend_cuda.virtual_clock(bytes_per_second=LAYER / 2 / 0.005), torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), expected)
        resident = [row.resident for row in handle.report().rows for name in row.names if "weight" in name]
        assert len(resident) == 24
        assert sum(resident[6:]) / 18 > sum(resident[:6]) / 6
        for _ in range(2):
            begin, end = (provider.device_module.Event(enable_timing=True) for _ in range(2))
            begin.record()
            model(x)
            end.record()
            end.synchronize()
        seconds = begin.elapsed_time(end) / 1000
    assert handle.tuning is not None and handle.tuning.seconds_after is not None
    assert handle.tuning.compute_seconds == pytest.approx(6 * 0.05, rel=0.01)
    # The simulated host waits for the device after each use. The real one runs ahead, so it is only faster
    assert 0.85 * handle.tuning.seconds_after < seconds < 1.03 * handle.tuning.seconds_after


def test_threads_that_call_at_the_same_time_are_measured_together(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=6 * LAYER + SLACK, prefetch=3)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        expected = moved(x)
    handle.retune()
    together = threading.Barrier(3)

    def call(_: int) -> list[torch.Tensor]:
        outputs = []
        for _ in range(CALLS):
            together.wait(60)
            with torch.no_grad():
                outputs.append(model(x))
        return outputs

    with ThreadPoolExecutor(3) as threads:
        for outputs in threads.map(call, range(3)):
            for output in outputs:
                testing.assert_bit_equal(output, expected)
    tuning = handle.tuning
    assert tuning is not None
    assert 2 <= tuning.passes <= 3 * 3  # passes that threads began before the first with the plan
    assert tuning.compute_seconds > 0 and tuning.bytes_per_second > 0
    if provider.native:
        assert tuning.seconds_before is not None and tuning.seconds_after is not None
        assert tuning.seconds_after <= 1.001 * tuning.seconds_before
    with torch.no_grad():
        testing.assert_bit_equal(model(x), expected)


def test_threads_that_make_one_pass_each_are_measured(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_rounds, "_MOST_THREADS", 3)
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=6 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        expected = moved(x)
    handle.retune()
    over = threading.Event()  # until then no thread gets the number of another

    def call(outputs: queue.SimpleQueue[torch.Tensor]) -> None:
        with torch.no_grad():
            outputs.put(model(x))
        over.wait(60)

    threads = []
    try:
        for _ in range(3 * CALLS):
            outputs: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
            threads.append(threading.Thread(target=call, args=(outputs,)))
            threads[-1].start()
            testing.assert_bit_equal(outputs.get(timeout=60), expected)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert handle.tuning is not None and handle.tuning.passes >= 2


def test_an_automatic_plan_does_not_wait_for_ever_for_what_is_held(
    provider: Provider, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tuning, "_PATIENCE", 5)
    model = model_of_layers()
    moved = testing.moved(model, provider.device, torch.float64)
    size = 10 * LAYER + SLACK
    room.leave(size)
    handle = provider.install(model, dtype=torch.float64, budget="auto")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
        held = last_layer(model).weight
        for _ in range(CALLS + 1):
            testing.assert_bit_equal(model(x), moved(x))
        assert handle.tuning is None  # held tensors would take memory besides the new plan
        for _ in range(5):
            testing.assert_bit_equal(model(x), moved(x))
        assert handle.tuning is not None and handle.tuning.passes >= 2
        testing.assert_bit_equal(held, last_layer(moved).weight)
        del held
        handle.reset_stats()
        for _ in range(2):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().peak_bytes <= size and handle.stats().overflow_bytes == 0


def test_retune_takes_another_budget(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=4 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
        before = handle.stats().resident_bytes
        handle.retune(9 * LAYER + SLACK)
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
        assert handle.budget == 9 * LAYER + SLACK
        assert handle.stats().resident_bytes >= before + 4 * LAYER
        handle.retune(4 * LAYER + SLACK)
        for _ in range(CALLS + 1):
            testing.assert_bit_equal(model(x), moved(x))
    handle.reset_stats()
    assert handle.stats().peak_bytes <= 4 * LAYER + SLACK


def test_retune_takes_the_minimum(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget="auto")
    assert handle.automatic
    x = provider.randn(2, WIDTH)
    handle.retune("Minimum")
    with torch.no_grad():
        for _ in range(CALLS + 1):
            testing.assert_bit_equal(model(x), moved(x))
        assert handle.budget is None and not handle.automatic
        handle.reset_stats()
        testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert stats.resident_groups == 0 and stats.bytes_moved == MODEL // 2
    assert stats.peak_bytes <= (3 if provider.native else 1) * LAYER + SLACK


def test_a_budget_that_does_not_work_leaves_the_one_there_is(provider: Provider) -> None:
    model = model_of_layers()
    budget = 4 * LAYER + SLACK
    moved, handle = provider.pair(model, budget=budget)
    x = provider.randn(2, WIDTH)
    handle.retune("1 KiB")
    with torch.no_grad(), pytest.warns(dynswap_ext.DynswapWarning, match="cannot retune.*smallest"):
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.budget == budget
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.stats().peak_bytes <= budget


def test_a_call_that_runs_out_of_memory_leaves_the_next_more_room(provider: Provider, room: Room) -> None:
    size, fails = 8 * LAYER + SLACK, False

    def take() -> object:
        if not fails:
            return None
        if provider.device.type == "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(size, dtype=torch.uint8, device=provider.device)

    model = TakesMemory(take).eval()
    moved = testing.moved(model, provider.device, torch.float64)
    room.leave(size)
    handle = provider.install(model, dtype=torch.float64, budget="auto")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
        before = handle.budget
        assert before is not None and room.is_all_given(handle)
        fails = True
        with (
            pytest.warns(dynswap_ext.DynswapWarning, match="memory ran out"),
            pytest.raises(torch.OutOfMemoryError, match="out of memory"),
        ):
            model(x)
        fails = False
        testing.assert_bit_equal(model(x), moved(x))
    assert handle.budget is not None and handle.budget < 0.8 * before
    handle.reset_stats()
    assert handle.stats().peak_bytes <= handle.budget


def test_other_errors_change_nothing(provider: Provider) -> None:
    model = model_of_layers()
    _, handle = provider.pair(model, budget="auto")
    before = handle.budget
    with pytest.raises(RuntimeError):
        model(provider.randn(2, WIDTH + 1))
    assert handle.budget == before


def test_an_install_shrinks_until_there_is_memory(
    provider: Provider, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider.native:
        pytest.skip("what the native provider allocates at the install is not Python's to refuse")
    room.leave(1 << 60)
    from dynswap_ext._python import session as python_provider

    plan, refused = python_provider.Session._make_plan, []

    def refuse(self, weights, budget):  # type: ignore[no-untyped-def]
        if budget is not None and budget > 1 << 40:
            refused.append(budget)
            raise dynswap_ext.OutOfMemoryError("no")
        return plan(self, weights, budget)

    monkeypatch.setattr(python_provider.Session, "_make_plan", refuse)
    model = model_of_layers()
    moved, handle = provider.pair(model, budget="auto")
    assert len(refused) > 3 and handle.budget is not None and handle.budget <= 1 << 40
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))


def test_training_goes_on_while_it_is_tuned(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=5 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    handle.retune(8 * LAYER + SLACK)
    for _ in range(CALLS + 1):
        for each in (model, moved):
            each.zero_grad()
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), moved.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            testing.assert_bit_equal(ours.grad, theirs.grad.to(ours.grad.device, ours.grad.dtype))
    assert handle.tuning is not None


def test_neither_tuner_nor_session_keeps_the_model(provider: Provider) -> None:
    model = model_of_layers()
    handle = provider.install(model, budget="auto")
    with torch.no_grad():
        for _ in range(CALLS):
            model(provider.randn(2, WIDTH, dtype=torch.float32))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not handle.active


def test_retune_refuses_what_it_cannot_do(provider: Provider) -> None:
    model = model_of_layers()
    handle = provider.install(model, budget=5 * LAYER)
    with pytest.raises(ConfigError, match="'much'"):
        handle.retune("much")
    handle.uninstall()
    with pytest.raises(ConfigError, match="uninstalled"):
        handle.retune()
