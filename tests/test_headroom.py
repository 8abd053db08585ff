"""`headroom=`: the memory that an automatic budget leaves to other programs, from pass to pass."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dynswap_ext
import pretend_cuda
from conftest import Provider
from dynswap_ext import ConfigError, _tuning, testing
from dynswap_ext._util import memory, peak_memory
from sample_models import mlp

pytestmark = pytest.mark.alone

WIDTH, LAYERS = 512, 12
#: Bytes of a layer in float64.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
HEADROOM = 2 * LAYER
#: Bytes of all memory. Activations take a part of the half layer.
MEMORY = 10 * LAYER + LAYER // 2
#: Calls until the plan is made, and until weights take the memory that others have left.
CALLS = 4
PATIENCE = _tuning._HEADROOM_PATIENCE + 1


class Machine:
    """A device of which other programs take a part."""

    def __init__(self, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
        self.provider = provider
        self.taken = 0
        self._on_cpu = provider.device.type == "cpu"
        if self._on_cpu:
            monkeypatch.setattr(memory, "_free_ram", self.free)
            monkeypatch.setattr(peak_memory, "resident_bytes", lambda: 0)
            monkeypatch.setattr(peak_memory, "_field", lambda *_: 0)
        elif not pretend_cuda.active():
            pytest.skip("needs a device whose memory another process takes: the pretend one")
        else:
            gc.collect()
            provider.device_module.synchronize()
            provider.device_module.empty_cache()
            pretend_cuda.faults().memory_bytes = provider.device_module.memory_reserved() + MEMORY

    def others_take(self, taken: int) -> None:
        self.taken = taken
        if not self._on_cpu:
            pretend_cuda.faults().taken_by_others = taken

    def free(self) -> int:
        """Return the bytes that are free outside a call."""
        if not self._on_cpu:
            return int(self.provider.device_module.mem_get_info()[0])
        held = [handle.stats() for handle in self.provider.handles if handle.active]
        return MEMORY - self.taken - sum(stats.resident_bytes + stats.arena_bytes for stats in held)


@pytest.fixture
def machine(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(provider, monkeypatch)


def layers(count: int = LAYERS) -> nn.Module:
    return mlp(WIDTH, count).eval().requires_grad_(False)


def install(provider: Provider, model: nn.Module, **options: Any) -> dynswap_ext.Handle:
    """Install with an automatic budget. Masters are cast on the CPU, so that they are streamed there too.

    On a device the model is cast first, since casts during copies take memory of their own.
    """
    if provider.device.type != "cpu":
        model.double()
    return provider.install(model, dtype=torch.float64, budget="auto", **options)


def test_residents_leave_when_others_need_memory_and_return(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        expected = testing.moved(model, provider.device, torch.float64)(x)
    machine = Machine(provider, monkeypatch)  # without the reference
    handle = install(provider, model, headroom=HEADROOM)
    assert f"headroom {memory.format_bytes(HEADROOM)}" in str(handle.report())

    def passes(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                testing.assert_bit_equal(model(x), expected)

    passes(CALLS)
    first = handle.stats()
    assert first.resident_bytes > LAYER and machine.free() >= HEADROOM * 7 // 8
    machine.others_take(2 * LAYER)
    passes(1)
    assert machine.free() >= HEADROOM * 7 // 8
    assert handle.stats().resident_bytes <= first.resident_bytes - LAYER
    passes(CALLS)  # measured again, for what is left
    left = handle.stats()
    assert machine.free() >= HEADROOM * 7 // 8 and left.resident_bytes > 0
    machine.others_take(0)
    passes(PATIENCE - 2)
    assert handle.stats().resident_bytes == left.resident_bytes  # they may only have paused
    passes(CALLS + 2)
    assert handle.stats().resident_bytes >= left.resident_bytes + LAYER
    assert machine.free() >= HEADROOM * 7 // 8
    handle.reset_stats()
    passes(2)
    stats = handle.stats()
    assert stats.bytes_moved <= 2 * (stats.weight_bytes - stats.resident_bytes // 2)


def test_few_residents_leave_too(provider: Provider, machine: Machine) -> None:
    """Residents leave if others need memory, even if they take less than an eighth of the headroom."""
    model, x = mlp(64, LAYERS).eval().requires_grad_(False), provider.randn(2, 64)
    handle = install(provider, model, headroom=MEMORY // 2)
    with torch.no_grad():
        for _ in range(5):
            model(x)
        held = handle.stats().resident_bytes
        assert 0 < held < MEMORY // 16
        machine.others_take(MEMORY - 2 * held)
        model(x)
        model(x)
    assert handle.stats().resident_bytes < held


def test_small_changes_are_left_alone(provider: Provider, machine: Machine) -> None:
    model = layers()
    x = provider.randn(2, WIDTH)
    handle = install(provider, model, headroom=HEADROOM)
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        planned = handle.tuning
        machine.others_take(HEADROOM // 16)
        for _ in range(2 * PATIENCE):
            model(x)
    assert handle.tuning is planned


def plans_made(handle: dynswap_ext.Handle, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    made: list[object] = []
    plan = _tuning.Tuner._plan

    def counted(self: _tuning.Tuner, budget: int | None, activations: int) -> None:
        made.append(budget)
        plan(self, budget, activations)

    monkeypatch.setattr(_tuning.Tuner, "_plan", counted)
    return made


@pytest.mark.filterwarnings("ignore::dynswap_ext.DynswapWarning")
def test_when_nothing_more_can_leave_nothing_is_tried(
    provider: Provider, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = layers(), provider.randn(2, WIDTH)
    handle = install(provider, model, headroom=HEADROOM, keep="0.*")
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        machine.others_take(MEMORY - 5 * LAYER)
        for _ in range(2 * CALLS):
            model(x)
        made = plans_made(handle, monkeypatch)
        for _ in range(4 * PATIENCE):
            model(x)
    assert not made


def test_others_are_heard_while_passes_are_measured(provider: Provider, machine: Machine) -> None:
    model, x = layers(), provider.randn(2, WIDTH)
    handle = install(provider, model, headroom=HEADROOM)
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        before = handle.stats().resident_bytes
        handle.retune()
        model(x)
        machine.others_take(2 * LAYER)
        model(x)
    assert handle.stats().resident_bytes <= before - LAYER
    assert machine.free() >= HEADROOM * 7 // 8


def test_who_does_not_ask_does_not_pay(
    provider: Provider, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("the driver is asked")

    model = layers(4)
    handle = install(provider, model)
    with torch.no_grad():
        for _ in range(CALLS):
            model(provider.randn(2, WIDTH))
        assert handle.tuning is not None
        for name in ("free_for_others", "free_bytes"):
            monkeypatch.setattr(_tuning, name, fail)
        for _ in range(PATIENCE):
            model(provider.randn(2, WIDTH))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"headroom": "2GiB"}, "headroom is '2GiB', and budget is None: .* Pass budget='auto'"),
        ({"headroom": "2GiB", "budget": "1GiB"}, "budget is '1GiB'"),
        ({"headroom": "lots", "budget": "auto"}, "headroom is 'lots'; expected a number of bytes"),
        ({"headroom": -1, "budget": "auto"}, "headroom is -1"),
        ({"headroom": True, "budget": "auto"}, "headroom is True"),
    ],
)
def test_what_is_refused(provider: Provider, options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        dynswap_ext.install(nn.Linear(2, 2), device=provider.device, **options)  # type: ignore[arg-type]


def test_more_than_there_is_leaves_the_least(provider: Provider, machine: Machine) -> None:
    model = layers()
    handle = install(provider, model, headroom="100%")
    with torch.no_grad():
        for _ in range(CALLS + 1):
            model(provider.randn(2, WIDTH))
    assert handle.budget is None and handle.stats().resident_bytes == 0


def test_threads_and_headroom(provider: Provider, machine: Machine) -> None:
    """One thread plans while others compute. The headroom has room for their copies outside the plan."""
    model = layers()
    x = provider.randn(2, WIDTH)
    handle = install(provider, model, headroom=5 * LAYER)
    wrong: list[BaseException] = []
    with torch.no_grad():
        expected = model(x)

    def compute(count: int) -> Callable[[], None]:
        def run() -> None:
            try:
                with torch.no_grad():
                    for _ in range(count):
                        assert torch.equal(model(x), expected)
            except BaseException as error:
                wrong.append(error)

        return run

    threads = [threading.Thread(target=compute(40)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        machine.others_take(2 * LAYER * (turn % 2))
        compute(4)()
    for thread in threads:
        thread.join()
    assert not wrong and handle.active
