"""The optimizers that random programs train with, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, optim

Make = Callable[[Iterable[Tensor]], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd for-loop": lambda p: optim.SGD(p, lr=0.1, foreach=False),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "adam fused": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
}
#: The optimizers that take sparse gradients.
SPARSE = ("sgd", "sgd for-loop", "adagrad")


def trained(model: torch.nn.Module) -> list[Tensor]:
    """Return the parameters that require gradients, each once, in order."""
    return [p for p in model.parameters() if p.requires_grad]
