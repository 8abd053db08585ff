"""A model's weights as a plan sees them: bytes, what a pass computes with them, and in which order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from dynswap_ext._util.places import mapping_of, stored_bytes
from dynswap_ext.checkpoint.options import check_dtype
from dynswap_ext.checkpoint.reader import Entry
from dynswap_ext.checkpoint.weight_units import StoredWeight, slice_of, whole_of

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
    #: Bytes of the weight on the device.
    nbytes: int
    #: Bytes that a copy of the weight moves: the smaller of its size in the master and on the device, or what
    #: is read from the disk.
    moved_bytes: int
    #: The number of the weight's module or expert. Weights of a unit are consecutive and are used together.
    unit: int
    kind: Kind
    elements: int
    #: The share of a pass's rows that reach the weight: less than 1 for an expert.
    share: float = 1.0
    #: Compute time of the kernels that read the weight, in a pass.
    seconds: float = 0.0
    #: Whether a call needs all weights of this unit at the same time.
    at_once: bool = False
    #: If copies read the weight from a file: the file's path, the offset in bytes, and whether it is cast.
    place: tuple[str, int, bool] | None = None
    #: For an expert, the part of its layer's experts that a pass uses, in no fixed order; 0 for other
    #: weights.
    by_use: float = 0.0
    #: Units of other modules that have the same master, and need it with all of theirs at the same time.
    also_in: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outline:
    """The weights of a model that has not run, and what is known of their use."""

    #: The model or the file that the outline was made from, in words.
    title: str
    weights: tuple[PlannedWeight, ...]
    #: Where the order of use comes from.
    order: str
    #: Assumptions that were made, one sentence each.
    notes: tuple[str, ...] = ()
    #: The files that hold the masters: none for a config, and for a model those that copies read.
    files: tuple[Path, ...] = ()
    #: Rows of a pass, unless you give another number.
    rows: int = 1
    #: A pass that has `rows` rows, in words.
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
            entry = _entry(master, stored, mappings)
            as_planned = partial(planned, kind=kind, dtype=dtype, disk=disk)
            if is_parameter and master.dim() >= 2 and master.shape[0] == count:
                for number, slices in enumerate(fused):
                    own_unit = unit + (number + 1) * len(modules)
                    slices.append(as_planned(slice_of(name, entry, number), own_unit, by_use=1.0))
            elif expert is not None:
                weights.append(as_planned(whole_of(name, entry), expert, by_use=1.0))
            else:
                weights.append(as_planned(whole_of(name, entry), unit, at_once=at_once))
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


def owners(model: nn.Module) -> list[nn.Module]:
    """Return the modules with masters of their own, in the order of registration."""
    return [module for module in model.modules() if own_masters(module)]


def multiplied(name: str) -> Kind:
    """Say whether a matrix of that name multiplies every row, or one."""
    return "once" if _ONCE.search(name.lower()) else "matrix"


def planned(
    weight: StoredWeight,
    unit: int,
    *,
    kind: Kind,
    dtype: torch.dtype | None,
    disk: bool,
    at_once: bool = False,
    by_use: float = 0.0,
) -> PlannedWeight:
    """Return a weight as an install casts it to `dtype` on the way, and as its copies read it."""
    stored, nbytes = weight.entry.dtype, weight.nbytes
    # Encoded ones stream as they are stored; the operation that uses them decodes.
    cast = dtype not in (None, stored) and stored.is_floating_point and not weight.entry.encoding
    if dtype is not None and cast:
        nbytes = weight.elements * dtype.itemsize
    return PlannedWeight(
        weight.name,
        nbytes,
        weight.nbytes if disk else min(weight.nbytes, nbytes),
        unit,
        kind,
        weight.elements,
        at_once=at_once,
        place=weight.place(cast=cast) if disk else None,
        by_use=by_use,
    )


def _entry(master: torch.Tensor, stored: torch.dtype | None, mappings: FileMappings | None) -> Entry:
    """Describe a master as a checkpoint would, with the range of the file that it is mapped from."""
    shape = tuple(master.shape)
    if inner_names(master) is not None:
        return Entry(master.dtype, shape, stored_bytes(master), Path(), None, type(master).__name__)
    dtype = stored if stored is not None and master.is_floating_point() else master.dtype
    entry = Entry(dtype, shape, master.numel() * dtype.itemsize, Path(), None)
    on_host = master.device.type == "cpu" and master.layout is torch.strided
    if mappings is None or not on_host or not adds_attributes_only(master) or not master.is_contiguous():
        return entry
    mapping = mapping_of(master, mappings)
    path = mapping and mapping.path
    if mapping is None or path is None:
        return entry
    return replace(entry, file=path, offset=mapping.offset_of(master.data_ptr()))
