"""Every way to write to a master. A program makes the same write in the plain and the installed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynswap_ext._python.master_state import is_sampled


@dataclass(frozen=True)
class Dice:
    """The random choices of one write, drawn from a seed."""

    seed: int

    def values(self, like: Tensor) -> Tensor:
        """Return new values of the same shape, dtype and layout, which every floating dtype can represent."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64).mul_(0.5).bfloat16()
        return torch.empty_like(like, requires_grad=False).copy_(drawn)

    def index(self, of: Tensor) -> tuple[int, ...]:
        """Return the index of one element."""
        return tuple(self.seed * (7 + 2 * i) % size for i, size in enumerate(of.shape))

    @property
    def number(self) -> float:
        """Return a factor by which products are exact."""
        return (0.5, 2.0, -1.0, -0.5)[self.seed % 4]


@dataclass(frozen=True)
class Place:
    """A master, given by the module that owns it and its name there."""

    owner: nn.Module
    name: str

    @property
    def held_in(self) -> dict[str, Any]:
        return self.owner._parameters if self.name in self.owner._parameters else self.owner._buffers

    @property
    def master(self) -> Tensor:
        """Return the master itself, without a read that the install would notice."""
        return self.held_in[self.name]

    @property
    def is_parameter(self) -> bool:
        return self.name in self.owner._parameters


Write = Callable[[Place, Dice], object]
Can = Callable[[Tensor], bool]


def _always(_: Tensor) -> bool:
    return True


def _square(p: Tensor) -> bool:
    return p.dim() == 2 and p.shape[0] == p.shape[1] and p.shape[0] > 1


def _has_rows(p: Tensor) -> bool:
    return p.dim() > 0 and p.numel() > 0


def _numpy(p: Tensor) -> bool:
    return _has_rows(p) and p.dtype in (torch.float32, torch.float64)


def _own_storage(p: Tensor) -> bool:
    return p.untyped_storage().nbytes() == p.numel() * p.element_size() and p.numel() > 0


def _viewed(p: Tensor) -> bool:
    return _own_storage(p) and p.is_contiguous()


def _copy_into_storage(place: Place, dice: Dice) -> None:
    values = dice.values(place.master)
    place.master.data_ptr()  # whoever writes to memory asks where it is; a coded master is plain from then on
    place.master.untyped_storage().copy_(values.untyped_storage())


def _replace(place: Place, dice: Dice) -> None:
    new = dice.values(place.master)
    setattr(place.owner, place.name, nn.Parameter(new, place.master.requires_grad))


def _replace_buffer(place: Place, dice: Dice) -> None:
    persistent = place.name not in place.owner._non_persistent_buffers_set
    place.owner.register_buffer(place.name, dice.values(place.master), persistent=persistent)


def _delete_and_add(place: Place, dice: Dice) -> None:
    new = nn.Parameter(dice.values(place.master))
    delattr(place.owner, place.name)
    place.owner.register_parameter(place.name, new)


def _swap(place: Place, dice: Dice) -> None:
    old = place.master
    new = dice.values(old)
    torch.utils.swap_tensors(old, nn.Parameter(new, old.requires_grad) if place.is_parameter else new)


def _set_data(place: Place, new: Tensor) -> None:
    place.master.data = new


def _with_gaps(p: Tensor) -> Tensor:
    """Return the same values with gaps between the rows."""
    return torch.empty(*p.shape[:-1], p.shape[-1] + 3, dtype=p.dtype)[..., : p.shape[-1]].copy_(p.detach())


@dataclass(frozen=True)
class MasterWrite:
    do: Write
    can: Can = _always
    #: Which masters it suits: "parameters", "buffers" or "both".
    of: str = "both"


MASTER_WRITES: dict[str, MasterWrite] = {
    "copy_": MasterWrite(lambda at, d: at.master.copy_(d.values(at.master))),
    "mul_": MasterWrite(lambda at, d: at.master.mul_(d.number)),
    "a row": MasterWrite(lambda at, d: at.master.__setitem__(d.index(at.master)[0], d.number), _has_rows),
    "an element": MasterWrite(lambda at, d: at.master.__setitem__(d.index(at.master), d.number)),
    "foreach": MasterWrite(lambda at, d: torch._foreach_mul_([at.master], d.number)),
    "init": MasterWrite(
        lambda at, d: nn.init.normal_(at.master, generator=torch.Generator().manual_seed(d.seed))
    ),
    "a view": MasterWrite(lambda at, d: at.master.view(-1)[d.seed % 3 :: 2].mul_(d.number), _viewed),
    "detach": MasterWrite(lambda at, d: at.master.detach().copy_(d.values(at.master))),
    "data mul_": MasterWrite(lambda at, d: at.master.data.mul_(d.number)),
    "data copy_": MasterWrite(lambda at, d: at.master.data.copy_(d.values(at.master))),
    "data a row": MasterWrite(
        lambda at, d: at.master.data.__setitem__(d.index(at.master)[0], d.number), _has_rows
    ),
    "data an element": MasterWrite(lambda at, d: at.master.data.__setitem__(d.index(at.master), d.number)),
    "data assigned": MasterWrite(lambda at, d: _set_data(at, d.values(at.master))),
    "data assigned, swapped back": MasterWrite(lambda at, d: _set_data(at, at.master.data.clone())),
    "data transposed": MasterWrite(lambda at, d: _set_data(at, at.master.data.t()), _square),
    "data contiguous": MasterWrite(lambda at, d: _set_data(at, at.master.data.contiguous())),
    "data with gaps": MasterWrite(lambda at, d: _set_data(at, _with_gaps(at.master)), _has_rows),
    "data channels last": MasterWrite(
        lambda at, d: _set_data(at, at.master.data.contiguous(memory_format=torch.channels_last)),
        lambda p: p.dim() == 4,
    ),
    "numpy": MasterWrite(
        lambda at, d: at.master.detach().numpy().__setitem__(..., d.values(at.master).numpy()), _numpy
    ),
    "numpy an element": MasterWrite(
        lambda at, d: at.master.detach().numpy().__setitem__(d.index(at.master), d.number),
        _numpy,
    ),
    "dlpack": MasterWrite(lambda at, d: torch.from_dlpack(at.master.detach()).copy_(d.values(at.master))),
    "dlpack a row": MasterWrite(
        lambda at, d: torch.from_dlpack(at.master.detach()).__setitem__(d.index(at.master)[0], d.number),
        _has_rows,
    ),
    "storage": MasterWrite(_copy_into_storage, _own_storage),
    "set_": MasterWrite(lambda at, d: at.master.set_(d.values(at.master))),
    "data set_": MasterWrite(lambda at, d: at.master.data.set_(d.values(at.master))),
    "swap_tensors": MasterWrite(_swap),
    "a new parameter": MasterWrite(_replace, of="parameters"),
    "deleted and added": MasterWrite(_delete_and_add, of="parameters"),
    "a new buffer": MasterWrite(_replace_buffer, of="buffers"),
}

#: The writes that change a part of a master, and bump no version.
_SMALL = ("data a row", "data an element", "numpy an element", "dlpack a row", "dlpack an element")


def may_go_unseen(name: str, master: Tensor) -> bool:
    """Return whether pure Python may miss a write: a small one, without version, to a sampled master.

    The same holds for writes to a tensor that it has handed out for such a master.
    """
    return name in _SMALL and is_sampled(master)
