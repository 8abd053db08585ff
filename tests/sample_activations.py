"""A model whose saved tensors exceed what may stay on the device, for tests of `activations=`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from conftest import Provider

WIDTH, ROWS, LAYERS = 64, 512, 12
#: Bytes of one activation.
ACTIVATION = ROWS * WIDTH * 4
#: What may stay on the device: four of them.
LIMIT = 4 * ACTIVATION

Forward = Callable[["Stack", Tensor], Tensor]


class Stack(nn.Module):
    """Layers, each of which saves three activations."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.forward_of: Forward = Stack.plain

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_of(self, x)

    def plain(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def step(self, x: Tensor) -> list[Tensor]:
        """Run forward and backward, and return the gradients on the CPU."""
        self.zero_grad()
        self(x).square().mean().backward()
        return self.gradients()

    def gradients(self) -> list[Tensor]:
        return [p.grad.cpu().clone() for p in self.parameters() if p.grad is not None]


def pair(provider: Provider, forward: Forward = Stack.plain) -> tuple[Stack, Stack, Tensor]:
    model = Stack()
    model.forward_of = forward
    moved = copy.deepcopy(model).to(provider.device)
    return model, moved, torch.randn(ROWS, WIDTH, device=provider.device)
