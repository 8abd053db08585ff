"""What a checkpoint has in it, and what budget a model of it needs; nothing is read but headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext._provider import native_extension, native_unavailable
from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.name_patterns import key_of, pattern_of
from dynswap_ext._util.tables import Printable, facts_grid, plain_table
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.checkpoint.weight_units import library_config, modules_of, units_of
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.config import provider_from_environment

#: By where the model computes, the engine's backend. On all accelerators memory is laid out alike.
_BACKENDS: Final = {"cpu": "host", "accelerator": "cuda"}


@dataclass(frozen=True)
class Group:
    """Weights that have to be on the device at one time.

    For a mixture of experts, these are the largest group that every pass uses, and the largest of an expert.
    """

    #: As in the checkpoint. Of an expert in a fused weight, the weight's with a number, as in "down_proj[3]".
    names: tuple[str, ...]
    #: On the device, with what lies between them: also the smallest budget that holds it.
    nbytes: int


@dataclass(frozen=True, repr=False)
class Summary(Printable):
    """The contents of a checkpoint, as `summary` returns them. ``print`` shows them; rich does in colour."""

    path: Path
    format: str
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    #: For each tensor that has several names, its names, with those that only the metadata has.
    ties: tuple[tuple[str, ...], ...]
    #: Keys of values that are no tensors.
    objects: tuple[str, ...]
    #: Text in addition to the tensors, without ties and checksums.
    metadata: Mapping[str, str]
    #: Bytes of all tensors as they are stored; shared ones count once.
    total_bytes: int
    bytes_by_dtype: Mapping[str, int]
    #: The largest of the smallest groups that an install can form, on "cpu" and "accelerator", in the
    #: checkpoint's dtypes. There is none where nothing is streamed.
    largest_groups: Mapping[str, Group]
    #: "native" or "python": whose groups these are.
    provider: str
    #: Whether `verify` has checksums to compare with.
    checksums: bool

    @property
    def largest_group(self) -> Group | None:
        """The largest group of an install on the CPU; None if nothing is streamed there."""
        return self.largest_groups.get("cpu")

    @property
    def smallest_budget(self) -> int:
        """Bytes of the smallest budget with which an install on the CPU works."""
        return self.largest_group.nbytes if self.largest_group else 0

    def __repr__(self) -> str:
        return f"<Summary of {self.path}: {len(self.entries)} tensors, {format_bytes(self.total_bytes)}>"

    def _parts(self) -> tuple[Any, ...]:
        return self.table(), facts_grid(self.facts().items())

    def table(self, *, collapse: bool = True) -> Any:
        """Return the table of tensors, for rich. Repeated layers share rows, unless `collapse` is False."""
        alike: dict[object, list[str]] = {}  # one name but for its numbers, one dtype and one shape
        for name, entry in self.entries.items():
            key = (key_of(name), dtype_name(entry), entry.shape) if collapse else name
            alike.setdefault(key, []).append(name)
        cells = []
        for names in alike.values():
            entry = self.entries[names[0]]
            shape = " x ".join(map(str, entry.shape)) or "scalar"
            size = format_bytes(sum(self.entries[name].nbytes for name in names))
            cells.append((pattern_of(names), str(len(names)), shape, dtype_name(entry), size))
        columns = ("key", "tensors", "shape", "dtype", "bytes")
        return plain_table(columns, cells, right=("tensors", "bytes"))

    def facts(self) -> dict[str, str]:
        """Return the facts about the whole checkpoint, as text, by their names."""
        group = self.largest_group
        metadata = [f"{name}: {text[:100]}" for name, text in self.metadata.items()]
        sizes = (f"{name} {format_bytes(size)}" for name, size in self.bytes_by_dtype.items())
        facts = {
            "format": self.format,
            "files": listed(list(map(str, self.files)), 10, lines=True),
            "tensors": f"{len(self.entries)}, {exact_bytes(self.total_bytes)}",
            "dtypes": ", ".join(sizes),
            "ties": listed([" = ".join(tie) for tie in self.ties], 10, lines=True),
            "not tensors": listed(self.objects, 10),
            "metadata": listed(metadata, 10, lines=True),
            "largest group": f"{exact_bytes(group.nbytes)}: {listed(group.names, 10)}" if group else "",
            "smallest budget": self._smallest(),
            "checksums": "kept; `verify` compares them" if self.checksums else "none",
        }
        return {name: text for name, text in facts.items() if text}

    def _smallest(self) -> str:
        """Name the smallest budgets, one line a device; one for all if they are equal."""
        sizes = {device: group.nbytes for device, group in self.largest_groups.items()}
        kind = "" if self.provider == "native" else ", in pure Python (`dynswap info` says why)"
        if len(sizes) == 2 and len(set(sizes.values())) == 1:
            return exact_bytes(sizes["cpu"]) + kind
        where = {"cpu": "on the CPU", "accelerator": "on an accelerator"}
        return "\n".join(f"{exact_bytes(size)} {where[device]}{kind}" for device, size in sizes.items())


def summary(path: str | PathLike[str]) -> Summary:
    """Look at a checkpoint of any format.

    Parameters
    ----------
    path
        Whatever `load` takes.

    Raises
    ------
    SourceError
        It cannot be read.

    Notes
    -----
    The engine forms the groups, of modules that are known by their names: weights of one module are those
    with the same name up to the last dot. Names that torch's own modules give tell that one call needs all of
    the module's weights. In which order other modules have theirs is not known of files that are sorted by
    name; where that matters, the smallest budget is more than what is needed, by some of the module's small
    weights. In pure Python every other weight is a group of its own, and on the CPU none is copied.
    """
    checkpoint = open_checkpoint(Path(path))
    names = names_of_each(checkpoint)
    once = {group[0]: checkpoint.entries[group[0]] for group in names}
    streamed = {name: entry for name, entry in once.items() if entry.nbytes}
    fuses = bool(library_config(checkpoint.files))
    largest = {device: _largest_group(streamed, device, fuses=fuses) for device in _BACKENDS}
    by_dtype: dict[str, int] = {}
    for entry in once.values():
        by_dtype[dtype_name(entry)] = by_dtype.get(dtype_name(entry), 0) + entry.nbytes
    return Summary(
        path=checkpoint.path,
        format=checkpoint.format,
        files=checkpoint.files,
        entries=checkpoint.entries,
        ties=tuple(tuple(group) for group in names if len(group) > 1),
        objects=tuple(checkpoint.objects),
        metadata=text_of(checkpoint),
        total_bytes=sum(by_dtype.values()),
        bytes_by_dtype=by_dtype,
        largest_groups={device: group for device, group in largest.items() if group},
        provider=_provider(),
        checksums=CHECKSUMS in checkpoint.metadata,
    )


def text_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata without ties and checksums, which are of this one file."""
    left_out = {CHECKSUMS, *_ties_in_metadata(checkpoint)}
    return {name: text for name, text in checkpoint.metadata.items() if name not in left_out}


def names_of_each(checkpoint: Checkpoint) -> list[list[str]]:
    """Return the names of each tensor: those of entries, then those that the metadata alone has."""
    names: dict[object, list[str]] = {}
    for name, entry in checkpoint.entries.items():
        names.setdefault(tie_identity(name, entry), []).append(name)
    for alias, kept in _ties_in_metadata(checkpoint).items():
        names[tie_identity(kept, checkpoint.entries[kept])].append(alias)
    return list(names.values())


def _ties_in_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return names that safetensors.torch.save_model left out, each with the entry that has its tensor."""
    text, entries = checkpoint.metadata, checkpoint.entries
    return {name: kept for name, kept in text.items() if name not in entries and kept in entries}


def tie_identity(name: str, entry: Entry) -> object:
    """Return what is equal for entries that are one tensor."""
    if entry.offset is None or entry.nbytes == 0:
        return name
    return entry.file, entry.offset, entry.dtype, entry.shape, entry.encoding


def dtype_name(entry: Entry) -> str:
    """Return the name of an entry's dtype, or of the encoding of its bytes."""
    return entry.encoding or str(entry.dtype).removeprefix("torch.")


def _provider() -> str:
    python = provider_from_environment() == "python" or native_unavailable(torch.device("cpu"))
    return "python" if python else "native"


def _largest_group(entries: Mapping[str, Entry], device: str, *, fuses: bool) -> Group | None:
    if device == "cpu":  # what is put together in memory is there already
        entries = {name: entry for name, entry in entries.items() if entry.offset is not None}
    if not entries:
        return None
    if _provider() == "python":
        together = [names for names, at_once in modules_of(entries) if at_once] + [[name] for name in entries]
        groups = [Group(tuple(names), sum(entries[name].nbytes for name in names)) for names in together]
        return None if device == "cpu" else max(groups, key=lambda group: group.nbytes)
    units = units_of(entries, fuses=fuses)
    weights = [(number, weight) for number, unit in enumerate(units) for weight in unit.weights]
    nbytes, members = native_extension().smallest_budget(
        [(weight.name, weight.nbytes, 0.0, unit) for unit, weight in weights],
        [weight.place() for _, weight in weights],
        _BACKENDS[device],
        {number for number, unit in enumerate(units) if unit.at_once},
        {number: 1.0 for number, unit in enumerate(units) if unit.by_use},
    )
    return Group(tuple(weights[member][1].name for member in members), nbytes)
