"""Groups a checkpoint's entries into units, as an install does: the weights of a module or of one expert."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Size

from dynswap_ext._util.experts import experts_of_names
from dynswap_ext._util.needed_at_once import units_of_names
from dynswap_ext.checkpoint.reader import LOSSLESS, Entry

#: Matrices of an expert that transformers fuses into one when it loads them.
_FUSED_PAIRS: Final = (("gate_proj", "up_proj"), ("w1", "w3"))


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that an install streams: an entry, one expert of an entry, or entries that are fused."""

    #: The entry's name. One expert of several in an entry has its number in brackets.
    name: str
    #: The entry that it is stored in; the first one if there are several.
    entry: Entry
    #: Bytes in the file.
    nbytes: int
    elements: int
    #: Bytes from the start of the entry's file; None if the weight is not one range of it.
    offset: int | None

    def place(self, *, cast: bool = False) -> tuple[str, int, bool] | None:
        """Return where the engine reads the weight: the file, the offset, and whether it converts it.

        That is so if it is coded, or if it is `cast`. None if the weight is in memory.
        """
        converted = cast or self.entry.encoding == LOSSLESS
        return None if self.offset is None else (str(self.entry.file), self.offset, converted)

    @property
    def used_bytes(self) -> int:
        """Bytes on the device, in the dtype of the entry: those in the file, unless these are coded."""
        return self.elements * self.entry.dtype.itemsize if self.entry.encoding == LOSSLESS else self.nbytes


@dataclass(frozen=True, slots=True)
class Unit:
    """The weights of a module, or of one expert, which are used together."""

    weights: tuple[StoredWeight, ...]
    #: Whether a call needs all of the weights at the same time.
    at_once: bool
    #: Whether the weights belong to an expert, which is used only if a router chooses it.
    by_use: bool


def units_of(entries: Mapping[str, Entry], *, fuses: bool = False) -> list[Unit]:
    """Return the units of a checkpoint's entries, in an order in which the model may use them.

    `fuses` says whether a library fuses the matrices of single experts when it loads them.
    """
    experts = experts_of_names(
        {name: () if entry.encoding else entry.shape for name, entry in entries.items()}
    )
    units: list[Unit] = []
    single: dict[str, list[str]] = {}  # by expert
    for names, at_once in modules_of(entries):
        slices = [name for name in names if experts.get(name, (0, ""))[0]]
        expert = experts.get(names[0], (0, ""))[1]
        whole = [name for name in names if name not in slices]
        if expert:
            if expert not in single:
                single[expert] = []
                units.append(Unit((), at_once=False, by_use=True))  # keeps the expert's place; filled below
            single[expert] += names
        elif whole:
            units.append(Unit(tuple(whole_of(name, entries[name]) for name in whole), at_once, by_use=False))
        for number in range(experts[slices[0]][0]) if slices else ():
            parts = tuple(slice_of(name, entries[name], number) for name in slices)
            units.append(Unit(parts, at_once=False, by_use=True))
    filled = iter(single.values())
    return [unit if unit.weights else _expert(next(filled), entries, fuses=fuses) for unit in units]


def modules_of(entries: Mapping[str, Entry]) -> list[tuple[list[str], bool]]:
    """Return the names of each module's weights, and whether the module needs them all at once.

    The names are in an order that the module may have. A file that is sorted by name has a bias before its
    weight, and does not show which of several large weights the small ones follow. They are put after the
    largest one, because no other order needs a larger budget.
    """
    small = max((entry.nbytes for entry in entries.values()), default=0) // 16
    modules: dict[str, list[str]] = {}
    for name in entries:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    units = units_of_names(modules)
    for names, _ in units:
        if entries[names[0]].nbytes <= small:
            largest = max(names, key=lambda name: entries[name].nbytes)
            names.sort(key=lambda name: name != largest and 1 + (entries[name].nbytes > small))
    return units


def library_config(files: Sequence[Path]) -> Mapping[str, Any]:
    """Return the content of transformers' config.json in a checkpoint's folder; empty without one."""
    for folder in dict.fromkeys(file.parent for file in files):
        try:
            content = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(content, dict) and "model_type" in content:
            return content
    return {}


def whole_of(name: str, entry: Entry) -> StoredWeight:
    """Return an entry as one weight."""
    return StoredWeight(name, entry, entry.nbytes, Size(entry.shape).numel(), entry.offset)


def slice_of(name: str, entry: Entry, number: int) -> StoredWeight:
    """Return one of the experts that are fused in an entry, by its number."""
    nbytes = entry.nbytes // entry.shape[0]
    offset = None if entry.offset is None else entry.offset + number * nbytes
    return StoredWeight(f"{name}[{number}]", entry, nbytes, Size(entry.shape[1:]).numel(), offset)


def _expert(names: Sequence[str], entries: Mapping[str, Entry], *, fuses: bool) -> Unit:
    fused = _fused(names, entries) if fuses else (whole_of(name, entries[name]) for name in names)
    return Unit(tuple(fused), at_once=False, by_use=True)


def _fused(names: Sequence[str], entries: Mapping[str, Entry]) -> Iterator[StoredWeight]:
    of = {tuple(name.split(".")[-2:]): name for name in names}
    partners = {
        of[gate, end]: of[up, end]
        for gate, up in _FUSED_PAIRS
        for _, end in of
        if (gate, end) in of and (up, end) in of
    }
    for name in names:
        if name in partners.values():
            continue
        weight = whole_of(name, entries[name])
        if name in partners:
            other = entries[partners[name]]
            both = f"{name}, {partners[name].rpartition('.')[0].rpartition('.')[2]}"
            elements = weight.elements + Size(other.shape).numel()
            weight = StoredWeight(both, weight.entry, weight.nbytes + other.nbytes, elements, weight.offset)
        yield weight
