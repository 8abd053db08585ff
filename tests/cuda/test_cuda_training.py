"""Training on a GPU: gradients reach the masters in RAM, to the bit and within the budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dynswap_ext import testing
from gpu_under_test import LAYER_BYTES, LAYERS, WIDTH, Exact, Gpu

LAYER = 2 * LAYER_BYTES  # in float64
RING = 3 * LAYER
SLACK = 1 << 20


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def expected_step(gpu: Gpu, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of the moved model, and its gradients in the masters' dtype."""
    moved = testing.moved(model, gpu.device, torch.float64)
    moved.zero_grad()
    loss = loss_of(moved, x)
    loss.backward()
    return loss.detach(), [p.grad.to("cpu", torch.float32) for p in moved.parameters()]


def assert_gradients(model: nn.Module, expected: list[Tensor], what: str = "") -> None:
    for (name, p), wanted in zip(model.named_parameters(), expected, strict=True):
        assert p.device.type == "cpu" and p.grad is not None, f"{name} has no gradient {what}"
        testing.assert_bit_equal(p.grad, wanted, f"gradient of {name} {what}")


@pytest.mark.parametrize("late", ["readers", "copies"])
@pytest.mark.parametrize("budget", [RING, "1GiB"], ids=["streamed", "resident"])
def test_steps(gpu: Gpu, budget: int | str, late: str) -> None:
    """In the second of two steps of SGD, weights are those that the first has written."""
    if not gpu.native and late == "copies":
        pytest.skip("pure Python copies pageable memory, for which torch waits")
    model = Exact()
    handle = gpu.install(model, dtype=torch.float64, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(2):
        x = gpu.whole_numbers(seed=step)
        expected, gradients = expected_step(gpu, model, x)
        optimizer.zero_grad()
        if late == "copies":
            gpu.congest()
        loss = loss_of(model, x)
        if late == "readers":
            gpu.delay(20)
        loss.backward()
        gpu.synchronise()
        testing.assert_bit_equal(loss.detach(), expected, f"loss of step {step}")
        assert_gradients(model, gradients, f"in step {step}")
        optimizer.step()
    stats = handle.stats()
    assert stats.overflow_bytes == 0
    if budget == RING:  # in forward and backward, except for what stays in the ring between them
        assert stats.bytes_moved >= 2 * (2 * LAYERS - 6) * LAYER_BYTES


def test_backward_on_a_stream_of_the_users_own(gpu: Gpu) -> None:
    model = Exact()
    gpu.install(model, dtype=torch.float64, budget=RING)
    x = gpu.whole_numbers()
    expected, gradients = expected_step(gpu, model, x)
    gpu.synchronise()
    stream = gpu.new_stream()
    with gpu.on(stream):
        gpu.delay(20)
        loss = loss_of(model, x)
        loss.backward()
    gpu.synchronise()
    testing.assert_bit_equal(loss.detach(), expected)
    assert_gradients(model, gradients)


def test_peak_of_a_step_is_the_budget_the_activations_and_a_gradient(gpu: Gpu) -> None:
    """A graph of an installed model holds no weights, while one of the moved model holds all."""
    model = Exact()
    handle = gpu.install(model, dtype=torch.float64, budget=RING)
    x = gpu.whole_numbers(rows=8)

    def steps() -> Iterator[None]:
        for _ in range(2):
            model.zero_grad()
            loss_of(model, x).backward()
            yield

    everything = steps()
    next(everything)  # makes torch's own workspaces
    with gpu.peak() as peak:
        next(everything)
    stats = handle.stats()
    assert stats.overflow_bytes == 0 and stats.peak_bytes <= RING
    if gpu.native:
        # The arena was there before. Also: a layer's gradient, its cast, and gradients on the way to RAM.
        activations = 4 * LAYERS * x.nbytes
        assert peak.bytes <= 4 * LAYER + activations + SLACK
        assert peak.bytes < LAYERS * LAYER
    assert x.shape[1] == WIDTH and stats.bytes_moved > 0
