"""Linear layers that stream through two slots, as in RamTorch; written here as a reference.

Weights of `nn.Linear` stay in pinned memory. Two slots on the device take turns: while one layer computes
from its slot, the next one's weights are copied into the other, on a separate stream. The order of layers is
learned from the last pass. Everything but the linear layers stays on the device. On the CPU there is no bus:
a layer reads its weights where they are, and only its bookkeeping takes time.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from head_to_head.baselines.base import PEER, RAM, Baseline, Prepared, Setting


@dataclass
class _Slot:
    bytes: Tensor
    holds: nn.Linear | None = None
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    read: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Streams:
    """The two slots of a model and the order in which its layers were called."""

    def __init__(self, linears: list[nn.Linear], device: torch.device) -> None:
        size = max(sum(_padded(master) for master in _masters(linear)) for linear in linears)
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(2)]
        self._copies = torch.cuda.Stream(device)
        self._copies.wait_stream(torch.cuda.current_stream(device))  # it may still use the slots' memory
        self._device = device
        self._next: dict[nn.Linear, nn.Linear] = {}
        self._last: nn.Linear | None = None
        self._turn = 0

    def __call__(self, linear: nn.Linear, x: Tensor) -> Tensor:
        compute = torch.cuda.current_stream(self._device)
        if self._last is not None:
            self._next[self._last] = linear
        self._last = linear
        slot = next((slot for slot in self._slots if slot.holds is linear), None) or self._copy(linear)
        compute.wait_event(slot.copied)
        weight, bias = _views(slot.bytes, linear)
        y = functional.linear(x, weight, bias)
        slot.read.record(compute)
        following = self._next.get(linear)
        if following is not None and all(slot.holds is not following for slot in self._slots):
            self._copy(following)
        return y

    def _copy(self, linear: nn.Linear) -> _Slot:
        slot = self._slots[self._turn]
        self._turn = 1 - self._turn
        self._copies.wait_event(slot.read)
        with torch.cuda.stream(self._copies):
            for target, master in zip(_views(slot.bytes, linear), _masters(linear), strict=False):
                if target is not None:
                    target.copy_(master, non_blocking=True)
            slot.copied.record(self._copies)
        slot.holds = linear
        return slot


def _masters(linear: nn.Linear) -> list[Tensor]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def _padded(tensor: Tensor) -> int:
    return (tensor.nbytes + 511) // 512 * 512


def _views(slot: Tensor, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    def view(begin: int, master: Tensor) -> Tensor:
        return slot[begin : begin + master.nbytes].view(master.dtype).view(master.shape)

    bias = linear.bias
    return view(0, linear.weight), None if bias is None else view(_padded(linear.weight), bias)


def _forward_here(self: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight, self.bias)


def stream_linears(model: nn.Module, device: torch.device) -> nn.Module:
    """Stream the linear layers of a model in RAM, and move the rest to the device."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    if not linears:
        raise ValueError("the model has no nn.Linear, and nothing else is streamed")
    if device.type == "cpu":
        for linear in linears:
            linear.forward = types.MethodType(_forward_here, linear)  # type: ignore[method-assign]
        return model
    held = {id(master) for linear in linears for master in _masters(linear)}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.pin_memory() if id(tensor) in held else tensor.data.to(device)
    streams = Streams(linears, device)
    for linear in linears:
        linear.forward = types.MethodType(streams.__call__, linear)  # type: ignore[method-assign]
    return model


def _prepare(setting: Setting) -> Prepared:
    return Prepared(stream_linears(setting.in_ram(), setting.device))


BASELINES = [
    Baseline(
        "RamTorch-style linears",
        PEER,
        _prepare,
        {
            RAM: "nothing: without a bus its layers read their weights where they are",
            "bus": "copies each nn.Linear through two slots, the next one ahead; the rest stays there",
        },
    )
]
