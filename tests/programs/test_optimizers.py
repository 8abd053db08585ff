"""Plain training loops over few rows of a large weight, with optimizers of torch and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import Provider
from programs import library
from sparse_rows import Sentences, bags
from ways import CAST, DEFAULT, MAPPED, RESIDENT, SMALLEST, Way, beside_plain

Parameters = Iterable[nn.Parameter]


def _adafactor_of_transformers(parameters: Parameters) -> torch.optim.Optimizer:
    return library("transformers").optimization.Adafactor(parameters)


def _adamw_of_torchao(parameters: Parameters) -> torch.optim.Optimizer:
    library("torchao")
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, weight_decay=0.0)


def _adamw_of_bitsandbytes(parameters: Parameters) -> torch.optim.Optimizer:
    """Make its 8-bit AdamW, which writes by address: its steps bump no version."""
    return library("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-2, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.3),
    "SGD fused, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused, no decay": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, fused=True),
    "Adafactor of torch": lambda p: torch.optim.Adafactor(p),
    "Adafactor of transformers": _adafactor_of_transformers,
    "AdamW of torchao": _adamw_of_torchao,
    "AdamW of bitsandbytes": _adamw_of_bitsandbytes,
}


def training_of(name: str, steps: int = 20) -> Callable[[nn.Module], Any]:
    data = Sentences()

    def program(model: nn.Module) -> Any:
        optimizer = OPTIMIZERS[name](model.parameters())
        device = model.rows.weight.device
        losses, gradients = [], []
        for step in range(steps):
            rows = torch.arange(4 * step, 4 * step + 4) % len(data)
            output = model(data.tokens[rows].to(device))
            loss = nn.functional.cross_entropy(output, data.labels[rows].to(device))
            loss.backward()
            gradients.append([p.grad.cpu().clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, gradients

    return program


@pytest.mark.parametrize("way", [MAPPED, CAST], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.slow
def test_sparse_rows(provider: Provider, way: Way, name: str, tmp_path: Path) -> None:
    # torchao would compile its step, which takes long. Without that its steps are slow.
    steps = 5 if "torchao" in name else 20
    with torch.compiler.set_stance("force_eager"):
        beside_plain(provider, way, tmp_path, bags, training_of(name, steps))


@pytest.mark.parametrize("way", [DEFAULT, RESIDENT, SMALLEST], ids=str)
def test_budgets(provider: Provider, way: Way, tmp_path: Path) -> None:
    beside_plain(provider, way, tmp_path, bags, training_of("AdamW fused, no decay"))
