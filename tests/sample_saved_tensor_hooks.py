"""Saved-tensor hooks such as libraries and users push."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class Hooks:
    """Hooks that keep each tensor as it is."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        self.given.append(tensor)
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed

    def active(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


class Offloading(Hooks):
    """Hooks that copy activations, but not weights, to the CPU, as OffloadActivations of trl and torchtune.

    Both take a tensor for a weight if its class is Parameter. The hooks of trl, which axolotl also has, do
    so too if it shares the memory of a parameter; those of torchtune copy views of parameters.
    """

    def __init__(self, model: nn.Module, library: str) -> None:
        super().__init__()
        self.pointers: set[int] = set()
        if library == "trl":
            self.pointers = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.tracker: dict[int, tuple[torch.Tensor, torch.device | None]] = {}
        self.copied = 0
        self.made = 0

    def pack(self, tensor: torch.Tensor) -> int:
        self.made += 1
        alone = isinstance(tensor, nn.Parameter) or tensor.untyped_storage().data_ptr() in self.pointers
        if alone or tensor.nbytes < 64:
            self.tracker[self.made] = tensor, None
        else:
            self.copied += tensor.numel()
            self.tracker[self.made] = tensor.to("cpu", copy=True), tensor.device
        return self.made

    def unpack(self, packed: int) -> torch.Tensor:
        tensor, device = self.tracker.pop(packed)
        return tensor if device is None else tensor.to(device)


class Halves(Hooks):
    """Hooks that round every floating tensor to float16."""

    def pack(self, tensor: torch.Tensor) -> Any:
        return tensor.half() if tensor.is_floating_point() else tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.double() if packed.is_floating_point() else packed
