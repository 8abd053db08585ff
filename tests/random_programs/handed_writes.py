"""Every way to write on a handed-out tensor that the contract allows outside a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from master_writes import Dice


def _assign_data(w: Tensor, dice: Dice) -> None:
    w.data = dice.values(w)


def _in_ram(w: Tensor) -> Tensor:
    """Return the tensor as another library has it through DLPack on the CPU; elsewhere its `.data`."""
    return torch.from_dlpack(w.detach()) if w.device.type == "cpu" else w.data


HANDED_WRITES: dict[str, Callable[[Tensor, Dice], object]] = {
    "copy_": lambda w, d: w.copy_(d.values(w)),
    "mul_": lambda w, d: w.mul_(d.number),
    "a row": lambda w, d: w.__setitem__(d.index(w)[:1], d.number),
    "an element": lambda w, d: w.__setitem__(d.index(w), d.number),
    "a view": lambda w, d: (w[::2] if w.dim() else w).fill_(d.number),
    "detach": lambda w, d: w.detach().mul_(d.number),
    "init": lambda w, d: nn.init.constant_(w, d.number),
    "data mul_": lambda w, d: w.data.mul_(d.number),
    "data copy_": lambda w, d: w.data.copy_(d.values(w)),
    "data a row": lambda w, d: w.data.__setitem__(d.index(w)[:1], d.number),
    "data an element": lambda w, d: w.data.__setitem__(d.index(w), d.number),
    "data assigned": _assign_data,
    "dlpack mul_": lambda w, d: _in_ram(w).mul_(d.number),
    "dlpack an element": lambda w, d: _in_ram(w).__setitem__(d.index(w), d.number),
}


def handed_write(name: str, tensor: Tensor, dice: Dice) -> None:
    with torch.no_grad():
        HANDED_WRITES[name](tensor, dice)
