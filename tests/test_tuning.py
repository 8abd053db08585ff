"""budget="auto" and Handle.retune: passes are measured, and what stays on the device follows from them."""

from __future__ import annotations

import gc
import mmap
import time
import weakref

import pytest
import torch
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import ConfigError, _memory, _tuning, testing
from sample_models import mlp

pytestmark = pytest.mark.alone

#: Wide enough for a layer to be a group of its own.
WIDTH, LAYERS = 768, 12
#: Bytes of one layer (weight and bias) in float64, what alignment may add, and the whole model.
LAYER = (WIDTH * WIDTH + WIDTH) * 8
SLACK = LAYERS * 4096
MODEL = LAYERS * LAYER
#: Calls until the plan is made: it goes by, it is measured (twice), it begins with the plan.
CALLS = 4


def model_of_layers() -> nn.Sequential:
    return mlp(WIDTH, LAYERS).eval()


def leave(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Have `room` bytes of the device free for weights, whatever the machine has."""
    monkeypatch.setattr(_tuning, "all_bytes", lambda device: 0)
    monkeypatch.setattr(_memory, "free_bytes", lambda device: room)
    held = 0

    def free(device: torch.device) -> int:
        return room - held

    class Peak:
        def __init__(self, device: torch.device) -> None:
            nonlocal held
            session = next(iter(_sessions))
            stats = session.stats()
            held = stats["resident_bytes"] + stats["arena_bytes"]

        def more(self) -> int:
            return 0

    _sessions: weakref.WeakSet[object] = weakref.WeakSet()
    begin = _tuning.Tuner.__init__

    def note(self, session, *args, **kwargs):  # type: ignore[no-untyped-def]
        _sessions.add(session)
        begin(self, session, *args, **kwargs)

    monkeypatch.setattr(_tuning.Tuner, "__init__", note)
    monkeypatch.setattr(_tuning, "free_bytes", free)
    monkeypatch.setattr(_tuning, "PeakMemory", Peak)


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


def test_the_budget_is_what_the_passes_leave(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 7 * LAYER + SLACK
    leave(monkeypatch, room)
    model = model_of_layers()
    moved, handle = provider.pair(model, budget="auto")
    assert handle.budget == room // 2  # until the activations are known
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS + 2):
            testing.assert_bit_equal(model(x), moved(x))
        handle.reset_stats()
        for _ in range(3):
            testing.assert_bit_equal(model(x), moved(x))
    stats = handle.stats()
    assert handle.budget == room
    assert stats.resident_bytes >= 2 * LAYER and stats.peak_bytes <= room and stats.overflow_bytes == 0
    streamed = (stats.weight_bytes - stats.resident_bytes) // 2
    assert 0 < stats.bytes_moved <= 3 * streamed + 3 * LAYER


def test_activations_are_left_room(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 9 * LAYER + SLACK)
    monkeypatch.setattr(_tuning.PeakMemory, "more", lambda self: 2 * LAYER)
    model = model_of_layers()
    _, handle = provider.pair(model, budget="auto")
    with torch.no_grad():
        for _ in range(CALLS):
            model(provider.randn(2, WIDTH))
    assert handle.tuning is not None and handle.tuning.activation_bytes == 2 * LAYER
    assert handle.budget == 9 * LAYER + SLACK - int(1.1 * 2 * LAYER)


def test_peak_memory_sees_what_is_over(provider: Provider) -> None:
    size = 64 << 20
    peak = _tuning.PeakMemory(provider.device)
    before = peak.more()
    if provider.device.type == "cpu":  # not from a heap that the process has already
        with mmap.mmap(-1, size) as memory:
            memory.write(b"1" * size)
    else:
        torch.ones(size, dtype=torch.uint8, device=provider.device)
    # The resident set is counted in batches of pages, and other threads have memory too.
    assert 0.9 * size <= peak.more() - before < 3 * size


class Slow(nn.Module):
    """A layer that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        time.sleep(self.seconds)
        return torch.tanh(nn.functional.linear(x, weight, bias))


def test_residents_are_those_that_save_time(provider: Provider) -> None:
    if not provider.native:
        pytest.skip("the pure-Python provider copies when a weight is needed: any resident saves as much")
    # Whatever a copy takes, it hides behind the slow part, and nothing hides it in the long quick one.
    model = nn.Sequential(*(Slow(0.05) for _ in range(6)), *(Slow(0.0) for _ in range(18))).eval()
    moved, handle = provider.pair(model, budget=7 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    handle.retune()
    with torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
    tuning = handle.tuning
    assert tuning is not None and tuning.seconds_before is not None and tuning.seconds_after is not None
    assert tuning.seconds_after <= 1.001 * tuning.seconds_before
    assert tuning.compute_seconds >= 6 * 0.05
    resident = [row.resident for row in handle.report().rows for _ in row.names if "weight" in _]
    assert len(resident) == 24
    assert sum(resident[6:]) / 18 > sum(resident[:6]) / 6


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


def test_a_budget_that_does_not_work_leaves_the_model_usable(provider: Provider) -> None:
    model = model_of_layers()
    moved, handle = provider.pair(model, budget=4 * LAYER + SLACK)
    x = provider.randn(2, WIDTH)
    handle.retune("1 KiB")
    with torch.no_grad(), pytest.warns(dynswap_ext.DynswapWarning, match="does not work"):
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
    assert handle.budget is None
    with torch.no_grad():
        testing.assert_bit_equal(model(x), moved(x))


class RunsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model_of_layers()
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if self.fail:
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return y


def test_a_call_that_runs_out_of_memory_leaves_the_next_more_room(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 8 * LAYER + SLACK)
    model = RunsOut().eval()
    moved, handle = provider.pair(model, budget="auto")
    x = provider.randn(2, WIDTH)
    with torch.no_grad():
        for _ in range(CALLS):
            testing.assert_bit_equal(model(x), moved(x))
        before = handle.budget
        assert before == 8 * LAYER + SLACK
        model.fail = True
        with (
            pytest.warns(dynswap_ext.DynswapWarning, match="memory ran out"),
            pytest.raises(torch.OutOfMemoryError, match="more than there is"),
        ):
            model(x)
        model.fail = False
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
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 1 << 60)
    if provider.native:
        pytest.skip("what the native provider allocates at the install is not Python's to refuse")
    from dynswap_ext import _fallback

    plan, refused = _fallback.Session._make_plan, []

    def refuse(self, states):  # type: ignore[no-untyped-def]
        if self._budget is not None and self._budget > 1 << 40:
            refused.append(self._budget)
            raise dynswap_ext.OutOfMemoryError("no")
        return plan(self, states)

    monkeypatch.setattr(_fallback.Session, "_make_plan", refuse)
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
