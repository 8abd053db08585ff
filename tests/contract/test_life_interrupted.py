"""Errors and interrupts during calls, installs and releases of tensors."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from types import FrameType

import pytest
import torch
from test_life import step
from torch import nn

import dynswap_ext
from conftest import Provider
from dynswap_ext import testing
from dynswap_ext._swap import class_swap
from sample_models import TinyTransformer, mlp, trace


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.error: BaseException | None = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if self.error is not None:
            raise self.error
        return x @ weight


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(), MemoryError()], ids=repr)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "train"])
def test_what_is_raised_in_a_forward_passes_through(
    provider: Provider, error: BaseException, grad: bool
) -> None:
    model = nn.Sequential(mlp(), Raises(error), mlp())
    before = trace(model)
    handle = provider.install(model, dtype=torch.float64)
    x = provider.randn(2, 16)
    with torch.inference_mode(not grad):
        for _ in range(3):
            with pytest.raises(type(error)) as caught:
                model(x)
            assert caught.value is error
    error.__traceback__ = None
    del caught
    testing.assert_nothing_held(handle)
    model[1].error = None
    moved = testing.moved(model, provider.device, torch.float64)
    testing.assert_bit_equal(model(x), moved(x))
    model[1].error = error
    dynswap_ext.uninstall(model)
    assert trace(model) == before


def test_keyboard_interrupts_at_any_moment(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python does not raise the error of a weak reference's callback or of a finaliser, but prints it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    model = mlp(features=64, layers=6)
    moved, handle = provider.pair(model, budget="1MiB")
    x = provider.randn(2, 64)
    expected = moved(x).detach()
    armed, came = False, 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal came
        if armed:
            came += 1
            raise KeyboardInterrupt

    def passes(number: int, timer: threading.Timer) -> None:
        nonlocal armed
        before, armed = came, True
        timer.start()
        try:
            while came == before:
                step(model, x) if number % 2 else model(x)
        finally:
            armed = False

    usual = signal.signal(signal.SIGINT, interrupt)
    try:
        for number in range(20):
            timer = threading.Timer(0.001 * (number % 7 + 1), _thread.interrupt_main)
            with contextlib.suppress(KeyboardInterrupt):
                passes(number, timer)
            timer.join()
            testing.assert_bit_equal(model(x).detach(), expected, "output after an interrupt")
    finally:
        signal.signal(signal.SIGINT, usual)
    model.zero_grad()
    step(model, x)
    step(moved, x)
    for master, other in zip(model.parameters(), moved.parameters(), strict=True):
        assert other.grad is not None
        testing.assert_bit_equal(master.grad, other.grad.cpu().float())
    testing.assert_nothing_held(handle)


def test_an_interrupted_install_leaves_the_model(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyTransformer()
    before = trace(model)
    original = nn.Module.modules

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt(name)

    with monkeypatch.context() as patch:
        patch.setattr(class_swap, "_initialiser", interrupted)
        for cached in list(class_swap._swap_classes):
            patch.delitem(class_swap._swap_classes, cached)
        with pytest.raises(KeyboardInterrupt):
            provider.install(model, dtype=torch.float64)
    assert nn.Module.modules is original and trace(model) == before
    with provider.install(model, dtype=torch.float64) as handle:
        assert handle.active
    assert trace(model) == before


def test_an_interrupt_while_a_handed_out_tensor_dies(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider.native:
        pytest.skip("no Python code runs when the native provider's tensors die")
    model = mlp()
    moved, handle = provider.pair(model)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    came = []

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "_died":
            came.append(event)
            raise KeyboardInterrupt

    weight = model[0].weight
    usual = sys.gettrace()
    sys.settrace(interrupt)
    try:
        del weight
    finally:
        sys.settrace(usual)
    assert came
    testing.assert_nothing_held(handle)
    x = provider.randn(2, 16)
    testing.assert_bit_equal(model(x), moved(x))
