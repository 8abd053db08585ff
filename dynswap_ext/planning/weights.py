"""A model's weights as a plan sees them: bytes, what a pass computes with them, and in which order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn

from dynswap_ext._subclasses import inner_names

#: What a pass does with a weight: multiplies each row by it (matrix), or a single one, as a time step's
#: embedding is (once); scales each row by it (norm); adds it (vector); or looks a few rows of it up.
Kind = Literal["matrix", "once", "norm", "vector", "lookup"]

#: Names of matrices that diffusion models multiply one row by, whatever the size of the image.
_ONCE: Final = re.compile(
    r"ada_?ln|modulation|(^|[._])mod(\.|_|$)|(img|txt)_mod|time_?(step_)?(text_)?embed|time_emb|guidance_(in|embed)"
    r"|(^|\.)(time|vector)_in\.|norm\w*\.linear\.|emb_layers|add_embedding"
)


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight, in the order of use."""

    name: str
    #: On the device.
    nbytes: int
    #: What its copy moves: the smaller of the master's and the device's, or what a disk reads.
    moved_bytes: int
    #: Its module, as a number; a module's weights are consecutive and are used together.
    unit: int
    kind: Kind
    elements: int
    #: Of the rows of a pass, those that it sees: less than 1 for an expert.
    share: float = 1.0
    #: Compute of the kernels that read it, in a pass.
    seconds: float = 0.0


@dataclass(frozen=True)
class Outline:
    """What is known of a model that has not run."""

    #: What it was made from, in words.
    title: str
    weights: tuple[Weight, ...]
    #: Where the order of use comes from.
    order: str
    #: What was taken for granted, a sentence each.
    notes: tuple[str, ...] = ()
    #: That hold masters; of a config there are none.
    files: tuple[Path, ...] = ()
    #: Rows of a pass, if nothing else is said, and what has so many.
    rows: int = 1
    rows_as: str = "one token, as in decoding"

    @property
    def nbytes(self) -> int:
        """Device bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def outline_of_model(
    model: nn.Module,
    *,
    title: str = "",
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    disk: bool = False,
    share: Callable[[str], float] = lambda name: 1.0,
) -> Outline:
    """Weights of a module, which may be on the meta device, in the order in which modules are registered.

    Parameters
    ----------
    model
        Not installed. Masters that several modules share are one weight, used where the first of them is.
    title
        What to call it; default: its class.
    dtype
        As for `install`: what floating weights are on the device.
    stored
        What floating masters will be in the checkpoint, if that is another dtype than the module has now.
    disk
        Copies read masters from a disk, which moves them as they are stored.
    share
        Given a weight's name, the part of a pass's rows that it sees.
    """
    found: list[Weight] = []
    units = owners(model)
    matrices = _multiplied(units)
    names = _names(model)
    seen: set[int] = set()
    for unit, module in enumerate(units):
        parameters = [master for master in module._parameters.values() if master is not None]
        norm = all(master.dim() < 2 for master in parameters)
        for master, parameter in own_masters(module):
            if id(master) in seen or master.numel() == 0:
                continue
            seen.add(id(master))
            nbytes, moved = _bytes(master, dtype, stored, disk=disk)
            name = names[id(master)]
            kind: Kind = "lookup" if not parameter or master.dim() >= 2 else "norm" if norm else "vector"
            if parameter and id(master) in matrices:
                kind = multiplied(name)
            found.append(Weight(name, nbytes, moved, unit, kind, master.numel(), share(name)))
    return Outline(title or type(model).__name__, tuple(found), "modules as the model registers them")


def owners(model: nn.Module) -> list[nn.Module]:
    """Modules with masters of their own, in the order of registration."""
    return [module for module in model.modules() if any(True for _ in own_masters(module))]


def own_masters(module: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """A module's own masters, each with whether it is a parameter."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter, True
    for buffer in module._buffers.values():
        if buffer is not None:
            yield buffer, False


def own_names(module: nn.Module) -> list[str]:
    """The attributes that hold them."""
    return [
        name
        for members in (module._parameters, module._buffers)
        for name, master in members.items()
        if master is not None
    ]


def multiplied(name: str) -> Kind:
    """Whether a matrix of that name multiplies every row, or one."""
    return "once" if _ONCE.search(name.lower()) else "matrix"


def _names(model: nn.Module) -> dict[int, str]:
    """The first name of each master, by its id: names are asked for once, not per module."""
    names: dict[int, str] = {}
    for name, master in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(id(master), name)
    return names


def _multiplied(units: list[nn.Module]) -> set[int]:
    """Masters that rows are multiplied by, by id. An embedding's is if another module shares it."""
    return {
        id(master)
        for module in units
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for master, parameter in own_masters(module)
        if parameter and master.dim() >= 2
    }


def _bytes(
    master: torch.Tensor, dtype: torch.dtype | None, stored: torch.dtype | None, *, disk: bool
) -> tuple[int, int]:
    """On the device, and moved."""
    inner = inner_names(master)
    if inner is not None:  # it streams as it is stored
        nbytes = sum(getattr(master, name).nbytes for name in inner)
        return nbytes, nbytes
    kept = stored if stored is not None and master.is_floating_point() else master.dtype
    return cast_bytes(master.numel() * kept.itemsize, master.numel(), kept, dtype, disk=disk)


def cast_bytes(
    stored_bytes: int, elements: int, stored: torch.dtype, dtype: torch.dtype | None, *, disk: bool
) -> tuple[int, int]:
    """Bytes on the device and bytes moved, of a weight that `install(dtype=dtype)` casts on the way."""
    nbytes = elements * dtype.itemsize if dtype is not None and stored.is_floating_point else stored_bytes
    return nbytes, stored_bytes if disk else min(stored_bytes, nbytes)
