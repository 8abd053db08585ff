"""A model's weights as a plan sees them: bytes, what a pass computes with them, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn

from dynswap_ext._swap.models import Installable, as_tree
from dynswap_ext._swap.subclasses import adds_attributes_only, inner_names
from dynswap_ext._util.experts import Experts, experts_of_modules
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.needed_at_once import units_of_modules
from dynswap_ext._util.own_masters import own_masters
from dynswap_ext.checkpoint.options import check_dtype

#: What a pass does with a weight: multiplies each row by it (matrix), or a single one, as a time step's
#: embedding is (once); scales each row by it (norm); adds it (vector); or looks a few rows of it up.
Kind = Literal["matrix", "once", "norm", "vector", "lookup"]

#: Names of matrices that diffusion models multiply one row by, whatever the size of the image.
_ONCE: Final = re.compile(
    r"ada_?ln|modulation|(^|[._])mod(\.|_|$)|(img|txt)_mod|time_?(step_)?(text_)?embed|time_emb|guidance_(in|embed)"
    r"|(^|\.)(time|vector)_in\.|norm\w*\.linear\.|emb_layers|add_embedding"
)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One weight, in the order of use."""

    name: str
    #: On the device.
    nbytes: int
    #: What its copy moves: the smaller of the master's and the device's, or what a disk reads.
    moved_bytes: int
    #: Its module, or its expert, as a number; a unit's weights are consecutive and are used together.
    unit: int
    kind: Kind
    elements: int
    #: Of the rows of a pass, those that it sees: less than 1 for an expert.
    share: float = 1.0
    #: Compute of the kernels that read it, in a pass.
    seconds: float = 0.0
    #: Whether a call needs all weights of the unit at the same time.
    at_once: bool = False
    #: Where copies read it, if that is a file: its path, the offset in bytes, and whether it is cast.
    place: tuple[str, int, bool] | None = None
    #: For an expert: the part of its layer's experts that a pass uses, in no fixed order. Else 0.
    by_use: float = 0.0
    #: Units of other modules that have the same master, and need it with all of theirs at the same time.
    also_in: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outline:
    """What is known of a model that has not run."""

    #: What it was made from, in words.
    title: str
    weights: tuple[PlannedWeight, ...]
    #: Where the order of use comes from.
    order: str
    #: What was taken for granted, a sentence each.
    notes: tuple[str, ...] = ()
    #: That hold masters; none of a config, and of a model those that copies read.
    files: tuple[Path, ...] = ()
    #: Rows of a pass, if nothing else is said, and what has so many.
    rows: int = 1
    rows_as: str = "one token, as in decoding"

    @property
    def nbytes(self) -> int:
        """Device bytes of all weights."""
        return sum(weight.nbytes for weight in self.weights)


def outline_of_model(
    model: Installable,
    *,
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    disk: bool = False,
) -> Outline:
    """Return the weights of a module, which may be on the meta device, in the order of registration.

    Parameters
    ----------
    model
        What `install` takes, and not installed. Masters that several modules share are one weight, used where
        the first of them is.
    dtype
        As for `install`: what floating weights are on the device.
    stored
        What floating masters will be in the checkpoint, if that is another dtype than the module has now.
    disk
        Copies read masters from a disk, which moves them as they are stored.
    """
    check_dtype(dtype)
    model = as_tree(model)
    modules = owners(model)
    # An embedding's matrix is multiplied by rows if another module shares it.
    matrices = {
        id(master)
        for module in modules
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for _, master, is_parameter in own_masters(module)
        if is_parameter and master.dim() >= 2
    }
    names: dict[int, str] = {}  # the first of each master
    for name, master in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(id(master), name)
    also_in: dict[str, list[int]] = {}  # of masters that were met before, by their names
    weights: list[PlannedWeight] = []
    mappings = FileMappings() if disk else None
    for unit, at_once, (count, expert), module in zip(
        *units_of_modules(modules), _experts(model, modules), modules, strict=True
    ):
        norm = all(master.dim() < 2 for _, master, is_parameter in own_masters(module) if is_parameter)
        fused: list[list[PlannedWeight]] = [[] for _ in range(count)]
        for _, master, is_parameter in own_masters(module):
            if master.numel() == 0:
                continue
            name = names[id(master)]
            if name in also_in:
                also_in[name] += [unit if expert is None else expert] * at_once
                continue
            also_in[name] = []
            kind: Kind = "norm" if norm else "vector"
            if id(master) in matrices:
                kind = multiplied(name)
            elif not is_parameter or master.dim() >= 2:
                kind = "lookup"
            nbytes, moved = _bytes(master, dtype, stored, disk=disk)
            place = _place(master, dtype, mappings) if mappings else None
            weight = PlannedWeight(
                name, nbytes, moved, unit, kind, master.numel(), at_once=at_once, place=place
            )
            if expert is not None:
                weight = replace(weight, unit=expert, at_once=False, by_use=1.0)
            if not is_parameter or master.dim() < 2 or master.shape[0] != count:
                weights.append(weight)
                continue
            for number, slices in enumerate(fused):
                slices.append(_slice(weight, number, unit + (number + 1) * len(modules), master))
        weights += chain.from_iterable(fused)
    weights = [replace(weight, also_in=tuple(also_in.get(weight.name, ()))) for weight in weights]
    files = dict.fromkeys(Path(weight.place[0]) for weight in weights if weight.place)
    return Outline(
        type(model).__name__, tuple(weights), "modules as the model registers them", files=tuple(files)
    )


def _experts(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[tuple[int, int | None]]:
    """Yield for each module how many fused experts it has, and the number of the expert that it is in."""
    every = list(model.modules())
    known = {id(every[place]): experts for place, experts in experts_of_modules(every).items()}
    numbers: dict[int, int] = {}
    for number, module in enumerate(modules):
        count, expert = known.get(id(module), Experts())
        yield count, None if expert < 0 else numbers.setdefault(expert, number)


def _slice(weight: PlannedWeight, number: int, unit: int, master: torch.Tensor) -> PlannedWeight:
    """Return one of the experts that are fused in a weight."""
    count = len(master)
    place = weight.place
    if place is not None:
        place = place[0], place[1] + number * (master.nbytes // count), place[2]
    return replace(
        weight,
        name=f"{weight.name}[{number}]",
        nbytes=weight.nbytes // count,
        moved_bytes=weight.moved_bytes // count,
        elements=weight.elements // count,
        unit=unit,
        at_once=False,
        place=place,
        by_use=1.0,
    )


def owners(model: nn.Module) -> list[nn.Module]:
    """Return the modules with masters of their own, in the order of registration."""
    return [module for module in model.modules() if own_masters(module)]


def multiplied(name: str) -> Kind:
    """Say whether a matrix of that name multiplies every row, or one."""
    return "once" if _ONCE.search(name.lower()) else "matrix"


def cast_bytes(
    stored_bytes: int, elements: int, stored: torch.dtype, dtype: torch.dtype | None, *, disk: bool
) -> tuple[int, int]:
    """Return bytes on the device and bytes moved, of a weight that an install casts to `dtype` on the way."""
    nbytes = elements * dtype.itemsize if dtype is not None and stored.is_floating_point else stored_bytes
    return nbytes, stored_bytes if disk else min(stored_bytes, nbytes)


def _place(
    master: torch.Tensor, dtype: torch.dtype | None, mappings: FileMappings
) -> tuple[str, int, bool] | None:
    if master.device.type != "cpu" or master.layout is not torch.strided or not adds_attributes_only(master):
        return None
    mapping = mappings.find(master.data_ptr()) if master.is_contiguous() else None
    if mapping is None or mapping.path is None:
        return None
    cast = dtype not in (None, master.dtype) and master.is_floating_point()
    return str(mapping.path), mapping.offset + master.data_ptr() - mapping.begin, cast


def _bytes(
    master: torch.Tensor, dtype: torch.dtype | None, stored: torch.dtype | None, *, disk: bool
) -> tuple[int, int]:
    """Return bytes on the device and bytes moved, of a master."""
    inner = inner_names(master)
    if inner is not None:  # it streams as it is stored
        nbytes = sum(getattr(master, name).nbytes for name in inner)
        return nbytes, nbytes
    kept = stored if stored is not None and master.is_floating_point() else master.dtype
    return cast_bytes(master.numel() * kept.itemsize, master.numel(), kept, dtype, disk=disk)
