"""Lists what a checkpoint contains, and what budget its model needs. Only headers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from dynswap_ext.checkpoint.reader import LOSSLESS, Checkpoint, Entry
from dynswap_ext.checkpoint.weight_units import library_config, modules_of, units_of
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.config import provider_from_environment

#: The engine's backend for each place where a model may compute. All accelerators lay out memory alike.
_BACKENDS: Final = {"cpu": "host", "accelerator": "cuda"}


@dataclass(frozen=True)
class Group:
    """The weights that decide the smallest budget with which an install works.

    They are the largest group that has to be on the device at one time. For a mixture of experts, that is the
    largest group that every pass uses, together with the largest group of an expert.
    """

    #: Names as in the checkpoint. One expert of a fused weight has a number, as in "down_proj[3]".
    names: tuple[str, ...]
    #: Bytes of the smallest budget, with the gaps between the weights.
    nbytes: int


@dataclass(frozen=True, repr=False)
class Summary(Printable):
    """The contents of a checkpoint, as `summary` returns them. ``print`` shows them; rich does in colour."""

    path: Path
    format: str
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    #: The names of each tensor that has several. Some of them may be in the metadata alone.
    ties: tuple[tuple[str, ...], ...]
    #: Keys of values that are no tensors.
    objects: tuple[str, ...]
    #: Text in addition to the tensors, without ties and checksums.
    metadata: Mapping[str, str]
    #: Bytes of all tensors as they are stored, also of coded ones; shared ones count once.
    total_bytes: int
    bytes_by_dtype: Mapping[str, int]
    #: By "cpu" and "accelerator", the weights that decide the smallest budget of an install there, in the
    #: checkpoint's dtypes. A place where nothing is streamed is left out.
    largest_groups: Mapping[str, Group]
    #: The provider that forms these groups: "native" or "python".
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
        alike: dict[object, list[str]] = {}  # same name apart from its numbers, same dtype, same shape
        for name, entry in self.entries.items():
            key = (key_of(name), dtype_name(entry), entry.shape) if collapse else name
            alike.setdefault(key, []).append(name)
        cells = []
        for names in alike.values():
            entry = self.entries[names[0]]
            shape = " x ".join(map(str, entry.shape)) or "scalar"
            size = _size([self.entries[name] for name in names])
            cells.append((pattern_of(names), str(len(names)), shape, dtype_name(entry), size))
        columns = ("key", "tensors", "shape", "dtype", "bytes")
        return plain_table(columns, cells, right=("tensors", "bytes"))

    def facts(self) -> dict[str, str]:
        """Return the facts about the whole checkpoint that `print` shows, as texts by their names."""
        group = self.largest_group
        metadata = [f"{name}: {text[:100]}" for name, text in self.metadata.items()]
        sizes = (f"{name} {format_bytes(size)}" for name, size in self.bytes_by_dtype.items())
        coded = [entry for entry in self.entries.values() if entry.encoding == LOSSLESS]
        facts = {
            "format": self.format,
            "files": listed(list(map(str, self.files)), 10, lines=True),
            "tensors": f"{len(self.entries)}, {exact_bytes(self.total_bytes)}",
            "dtypes": ", ".join(sizes),
            "lossless": f"{len(coded)} tensors, {_size(coded)}" if coded else "",
            "ties": listed([" = ".join(tie) for tie in self.ties], 10, lines=True),
            "not tensors": listed(self.objects, 10),
            "metadata": listed(metadata, 10, lines=True),
            "largest group": f"{exact_bytes(group.nbytes)}: {listed(group.names, 10)}" if group else "",
            "smallest budget": self._smallest(),
            "checksums": "kept; `verify` compares them" if self.checksums else "none",
        }
        return {name: text for name, text in facts.items() if text}

    def _smallest(self) -> str:
        """Return the smallest budgets as text, with a line for each device, or one line if they are equal."""
        sizes = {device: group.nbytes for device, group in self.largest_groups.items()}
        kind = "" if self.provider == "native" else ", in pure Python (`dynswap info` says why)"
        if len(sizes) == 2 and len(set(sizes.values())) == 1:
            return exact_bytes(sizes["cpu"]) + kind
        where = {"cpu": "on the CPU", "accelerator": "on an accelerator"}
        return "\n".join(f"{exact_bytes(size)} {where[device]}{kind}" for device, size in sizes.items())


def summary(path: str | PathLike[str]) -> Summary:
    """Describe a checkpoint of any format: its tensors, and the smallest budget of an install of its model.

    Parameters
    ----------
    path
        The path of a checkpoint, as for `load`.

    Raises
    ------
    SourceError
        The checkpoint cannot be read.

    Notes
    -----
    The engine forms groups of weights from their names. Names that are equal up to the last dot belong to one
    module. If the rest are names of torch's own modules (``weight``, ``in_proj_bias``), one call needs all
    weights of the module at the same time. For other modules the order of the weights counts, and files that
    are sorted by name do not show it. Then the smallest budget may be larger than needed, by some small
    weights of the module. In pure Python, each weight of such a module is a group by itself, and an install
    on the CPU has no groups, as it copies no weights.
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
    """Return the metadata without ties and checksums, which are true of this file alone."""
    left_out = {CHECKSUMS, *_ties_in_metadata(checkpoint)}
    return {name: text for name, text in checkpoint.metadata.items() if name not in left_out}


def names_of_each(checkpoint: Checkpoint) -> list[list[str]]:
    """Return the names of each tensor: first those of entries, then those that are in the metadata alone."""
    names: dict[object, list[str]] = {}
    for name, entry in checkpoint.entries.items():
        names.setdefault(tie_identity(name, entry), []).append(name)
    for alias, kept in _ties_in_metadata(checkpoint).items():
        names[tie_identity(kept, checkpoint.entries[kept])].append(alias)
    return list(names.values())


def _ties_in_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the names that ``safetensors.torch.save_model`` dropped, each with the entry of its tensor."""
    text, entries = checkpoint.metadata, checkpoint.entries
    return {name: kept for name, kept in text.items() if name not in entries and kept in entries}


def _size(entries: Sequence[Entry]) -> str:
    """Return the bytes of entries as text, with the ratio by which the lossless code makes them smaller."""
    stored, used = (sum(getattr(each, name) for each in entries) for name in ("nbytes", "used_bytes"))
    smaller = f" for {format_bytes(used)} ({used / stored:.2f} times smaller)" if used != stored else ""
    return format_bytes(stored) + smaller


def tie_identity(name: str, entry: Entry) -> object:
    """Return a key that is equal for entries that are one tensor under several names."""
    if entry.offset is None or entry.nbytes == 0:
        return name
    return entry.file, entry.offset, entry.dtype, entry.shape, entry.encoding


def dtype_name(entry: Entry) -> str:
    """Return the name of an entry's dtype, or of the encoding of its bytes."""
    name = str(entry.dtype).removeprefix("torch.")
    return f"{name} {LOSSLESS}" if entry.encoding == LOSSLESS else entry.encoding or name


def _provider() -> str:
    python = provider_from_environment() == "python" or native_unavailable(torch.device("cpu"))
    return "python" if python else "native"


def _largest_group(entries: Mapping[str, Entry], device: str, *, fuses: bool) -> Group | None:
    if device == "cpu":  # a tensor that is put together in memory is not streamed
        entries = {name: entry for name, entry in entries.items() if entry.offset is not None}
    if not entries:
        return None
    if _provider() == "python":
        together = [names for names, at_once in modules_of(entries) if at_once] + [[name] for name in entries]
        groups = [Group(tuple(names), sum(entries[name].used_bytes for name in names)) for names in together]
        return None if device == "cpu" else max(groups, key=lambda group: group.nbytes)
    units = units_of(entries, fuses=fuses)
    weights = [(number, weight) for number, unit in enumerate(units) for weight in unit.weights]
    nbytes, members = native_extension().smallest_budget(
        [(weight.name, weight.used_bytes, 0.0, unit) for unit, weight in weights],
        [weight.place() for _, weight in weights],
        _BACKENDS[device],
        {number for number, unit in enumerate(units) if unit.at_once},
        {number: 1.0 for number, unit in enumerate(units) if unit.by_use},
    )
    return Group(tuple(weights[member][1].name for member in members), nbytes)
