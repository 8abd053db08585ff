"""Programs for the hazards of tensors that leave the device until backward needs them (`activations=`)."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from dynswap_ext import testing
from scenarios import RING
from world import ROWS, WIDTH, World, whole_numbers


class Halves(torch.autograd.Function):
    """Two halves of one memory, each with a version of its own, as torch's GRU has them (`unsafe_chunk`)."""

    @staticmethod
    def forward(_: Any, y: Tensor) -> tuple[Tensor, ...]:
        """Return the halves of a copy."""
        memory, size = y.clone().untyped_storage(), y.numel() // 2
        shape = (y.shape[0] // 2, y.shape[1])
        return tuple(torch.empty_like(y[:0]).set_(memory, half * size, shape) for half in (0, 1))

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the whole."""
        return torch.cat(gradients)


class InParts(nn.Module):
    """A layer that saves the two halves of what it computes, and writes one of them in between."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole_numbers(generator, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        left, right = Halves.apply(y)
        kept = torch.abs(left)  # saves `left`, and with it the memory of both
        right.add_(1.0)
        return torch.remainder(torch.cat([kept, torch.abs(right)]), 5.0)


def saved_tensors_leave(world: World) -> None:
    """What is saved leaves while compute is late, and other tensors take its memory."""
    generator = torch.Generator().manual_seed(world.seed)
    model = nn.Sequential(*(InParts(generator) for _ in range(5)))
    twin = testing.moved(model, "cpu", torch.float64)
    # Nearly all leaves, or half of it.
    activations = world.random.choice([1, 10 * ROWS * WIDTH * 8])
    options: dict[str, Any] = {"budget": RING, "activations": activations}
    if world.random.random() < 0.5:  # little page-locked memory for them, or none
        masters = sum(p.nbytes for p in model.parameters())
        least = "minimum", masters + (64 << 20) + 4 * ROWS * WIDTH * 8
        options |= {"host_budget": world.random.choice(least), "activations_folder": tempfile.gettempdir()}
    world.install(model, dtype=torch.float64, **options)
    for number in range(4):
        x, host = world.numbers(torch.float64, rows=2 * ROWS)
        stream = world.random.choice(world.streams[:1] if number else world.streams)
        with torch.cuda.stream(stream):
            there = x.detach().requires_grad_()
            output = model(there)
            world.fill(4, 2 * ROWS * WIDTH * 8)
            gradient = torch.autograd.grad(output.sum(), there)[0]
            world.fill(4, 2 * ROWS * WIDTH * 8)
        host = host.requires_grad_()
        expected = torch.autograd.grad(twin(host).sum(), host)[0]
        world.compare_later(gradient, expected, f"the gradient, step {number}", stream)


SCENARIOS = [saved_tensors_leave]
