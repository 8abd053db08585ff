"""The weights of a model for planning: bytes, compute in a pass, and order of use."""

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
from dynswap_ext.checkpoint.reader import LOSSLESS, Entry
from dynswap_ext.checkpoint.weight_units import StoredWeight, slice_of, whole_of
from dynswap_ext.lossless.tensor import LosslessTensor

#: What a pass does with a weight. It multiplies each row by it (matrix), or a single row, such as that of a
#: time step (once); scales each row by it (norm); adds it (vector); or looks a few rows of it up (lookup).
Kind = Literal["matrix", "once", "norm", "vector", "lookup"]

#: Names of matrices by which diffusion models multiply a single row, whatever the size of the image.
_ONCE: Final = re.compile(
    r"ada_?ln|modulation|(^|[._])mod(\.|_|$)|(img|txt)_mod|time_?(step_)?(text_)?embed|time_emb|guidance_(in|embed)"
    r"|(^|\.)(time|vector)_in\.|norm\w*\.linear\.|emb_layers|add_embedding"
)


@dataclass(frozen=True, slots=True)
class PlannedWeight:
    """One weight of a model for planning: its bytes, and what a pass does with it."""

    #: The name in the model, such as "layers.0.weight".
    name: str
    #: Bytes of the weight on the device.
    nbytes: int
    #: Bytes that a copy of the weight moves: the smaller of its size in the master and on the device, or what
    #: is read from the disk.
    moved_bytes: int
    #: The number of the weight's module or expert. Weights of a unit are consecutive and are used together.
    unit: int
    #: What a pass does with the weight: "matrix", "once", "norm", "vector" or "lookup" (`Kind`).
    kind: Kind
    #: The number of the weight's elements.
    elements: int
    #: The share of a pass's rows that reach the weight: less than 1 for an expert.
    share: float = 1.0
    #: Compute time of the kernels that read the weight, in seconds of a pass.
    seconds: float = 0.0
    #: Whether a call needs all weights of this unit at the same time.
    at_once: bool = False
    #: If copies read the weight from a file: the file's path, the offset in bytes, and whether it is cast or
    #: decoded.
    place: tuple[str, int, bool] | None = None
    #: For an expert, the part of its layer's experts that a pass uses, in no fixed order; 0 for other
    #: weights.
    by_use: float = 0.0
    #: Units of other modules that share the weight, and need it at the same time as all of their own weights.
    also_in: tuple[int, ...] = ()
    #: Whether the master is coded without loss, so that a copy moves fewer bytes than it has values.
    coded: bool = False


@dataclass(frozen=True)
class Outline:
    """The weights of a model that has not run, and what is known of their use."""

    #: The model or the file that the outline was made from, in words.
    title: str
    #: The weights in the order of use.
    weights: tuple[PlannedWeight, ...]
    #: Where the order of use comes from, in words.
    order: str
    #: Assumptions that were made, one sentence each.
    notes: tuple[str, ...] = ()
    #: The files with the weights: of a checkpoint all, of a model those that copies read, of a config none.
    files: tuple[Path, ...] = ()
    #: The number of rows of a pass, unless you give another number.
    rows: int = 1
    #: What a pass with `rows` rows is, in words.
    rows_as: str = "one token, as in decoding"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(weight.nbytes for weight in self.weights)


def outline_of_model(
    model: Installable,
    *,
    dtype: torch.dtype | None = None,
    stored: torch.dtype | None = None,
    disk: bool = False,
) -> Outline:
    """Return the weights of a model in the order of registration, for planning.

    Parameters
    ----------
    model
        A module, or a pipeline, list, tuple or dict of modules, which must not be installed. It may be on the
        meta device. A master that several modules share is one weight, which the first of them uses.
    dtype
        The option of `install`: the dtype of floating weights on the device.
    stored
        The dtype of floating masters in the checkpoint, if the model has another one now.
    disk
        Whether copies will read masters from a disk, which moves them as they are stored.
    """
    check_dtype(dtype)
    model = as_tree(model)
    modules = owners(model)
    # The table of an embedding is a matrix, too, if another module shares it.
    matrices = {
        id(master)
        for module in modules
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for _, master, is_parameter in own_masters(module)
        if is_parameter and master.dim() >= 2
    }
    names: dict[int, str] = {}  # by the id of a master, its first name
    for name, master in (*model.named_parameters(), *model.named_buffers()):
        names.setdefault(id(master), name)
    also_in: dict[str, list[int]] = {}  # by the name of a weight, the units of later modules that share it
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
    """Yield for each module how many fused experts it has, and the unit of the expert that it is part of."""
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
    """Return the kind of a matrix by its name: "once" if it is multiplied by a single row, else "matrix"."""
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
    """Return a stored weight for planning: its bytes on the device, cast to `dtype`, and in a copy."""
    stored, nbytes = weight.entry.dtype, weight.used_bytes
    # Quantised weights are copied as they are stored, and decoded by the operation that uses them.
    cast = dtype not in (None, stored) and stored.is_floating_point and weight.entry.is_exact
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
        coded=weight.entry.encoding == LOSSLESS,
    )


def _entry(master: torch.Tensor, stored: torch.dtype | None, mappings: FileMappings | None) -> Entry:
    """Return a master as an entry of a checkpoint, with the file's range if it is mapped from one."""
    shape = tuple(master.shape)
    if isinstance(master, LosslessTensor) and (coded := master.coded) is not None and master.is_whole():
        held = _entry(coded, None, mappings)
        return replace(held, dtype=master.dtype, shape=shape, encoding=LOSSLESS)
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
