"""Models whose masters are coded (`LosslessTensor`), however little that saves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynswap_ext.lossless.code import BLOCK, CODABLE, encode
from dynswap_ext.lossless.tensor import LosslessTensor

_UNIT = 16


def coded(tensor: Tensor) -> LosslessTensor:
    """Return the values of a tensor as a coded one; in raw blocks, if that takes fewer bytes."""
    found = encode(tensor)
    return LosslessTensor(_raw(tensor) if found is None else found, tensor.dtype, tensor.shape)


def code_masters(model: nn.Module) -> nn.Module:
    """Replace the parameters that can be coded, and return the model. Ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, master in list(module._parameters.items()):
            if master is None or master.dtype not in CODABLE or master.numel() == 0:
                continue
            if id(master) not in made:
                made[id(master)] = nn.Parameter(coded(master.detach()), master.requires_grad)
            module._parameters[name] = made[id(master)]
    return model


def code_in_place(model: nn.Module) -> None:
    """Replace the values of parameters, which stay the same objects, where torch lets us."""
    for master in model.parameters():
        plain = (
            type(master) is nn.Parameter and type(master.data) is Tensor and master.layout == torch.strided
        )
        if not plain or master.dtype not in CODABLE or master.device.type != "cpu" or master.numel() == 0:
            continue
        whole = master.is_contiguous() and master.untyped_storage().nbytes() == master.nbytes
        if not whole or master.is_inference() or master.is_shared():
            continue
        made = nn.Parameter(coded(master.detach()), master.requires_grad)
        made.grad, attributes = master.grad, dict(vars(master))
        try:
            torch.utils.swap_tensors(master, made)
        except RuntimeError:  # somebody has a weak reference to it, or a graph
            continue
        vars(master).update(attributes)


def is_coded(master: Any) -> bool:
    return isinstance(master, LosslessTensor) and master.coded is not None


def stored_bytes(master: Tensor) -> int:
    """Return the bytes of a master that a copy reads: of a coded one, its blocks without their index."""
    coded: Any = getattr(master, "coded", None)
    if coded is None:
        return master.numel() * master.element_size()
    return coded.numel() - int(coded[:8].view(torch.int64))


def _raw(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    blocks = [
        _padded(torch.cat([torch.zeros(_UNIT, dtype=torch.uint8), part.view(torch.uint8)]))
        for part in flat.split(BLOCK)
    ]
    sizes = torch.tensor([0, *(len(block) for block in blocks)])
    index = _padded(torch.empty(8 * len(sizes), dtype=torch.uint8))
    offsets = sizes.cumsum(0) + len(index)
    index[: 8 * len(sizes)] = offsets.view(torch.uint8)
    index[8 * len(sizes) :] = 0
    return torch.cat([index, *blocks])


def _padded(data: Tensor) -> Tensor:
    return torch.cat([data, torch.zeros(-len(data) % _UNIT, dtype=torch.uint8)])
