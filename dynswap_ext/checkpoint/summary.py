"""What a checkpoint has in it, and what budget a model of it needs; nothing is read but headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Final

from dynswap_ext._util.name_patterns import key_of, pattern_of
from dynswap_ext._util.needed_at_once import units_of_names
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.checkpoint.writing.direct import ALIGNMENT, align_up
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS
from dynswap_ext.checkpoint.writing.pieces import tie_identity, ties_in_metadata
from dynswap_ext.checkpoint.writing.target import SUFFIX

# As csrc/core/engine_plan.cpp and csrc/io/file.h (kSmallRead) have them.
_WEIGHT_ALIGNMENT: Final = 64
_IN_PLACE_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Group:
    """Weights that have to be on the device at one time."""

    names: tuple[str, ...]
    #: On the device, with what lies between them.
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """What `summary` found."""

    path: Path
    format: str
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]
    #: Names of one tensor, for each tensor that has several. What the metadata alone names is among them.
    ties: tuple[tuple[str, ...], ...]
    #: Keys of what is no tensor.
    objects: tuple[str, ...]
    #: Text in addition to the tensors, without ties and checksums.
    metadata: Mapping[str, str]
    #: Of tensors, as stored; what is shared counts once.
    total_bytes: int
    bytes_by_dtype: Mapping[str, int]
    #: The largest of the smallest groups that an install can form; None without tensors.
    largest_group: Group | None
    #: Whether `verify` has checksums to compare with.
    checksums: bool

    @property
    def smallest_budget(self) -> int:
        """Bytes of the smallest budget with which an install on the CPU works, in the checkpoint's dtypes."""
        return self.largest_group.nbytes if self.largest_group else 0


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
    Groups are formed from names: weights of one module are those with the same name up to the last dot. Names
    that torch's own modules give tell that one call needs all of the module's weights. In which order other
    modules have theirs is not known of files that are sorted by name; where that matters, the smallest budget
    is more than what is needed, by some of the module's small weights.
    """
    checkpoint = open_checkpoint(Path(path))
    aliases = ties_in_metadata(checkpoint.entries, checkpoint.metadata)
    names: dict[object, list[str]] = {}
    for name, entry in checkpoint.entries.items():
        names.setdefault(tie_identity(name, entry), []).append(name)
    once = {group[0]: checkpoint.entries[group[0]] for group in names.values()}
    ties = [
        (*group, *(alias for alias, kept in aliases.items() if kept in group)) for group in names.values()
    ]
    by_dtype: dict[str, int] = {}
    for entry in once.values():
        by_dtype[dtype_name(entry)] = by_dtype.get(dtype_name(entry), 0) + entry.nbytes
    return Summary(
        path=checkpoint.path,
        format=checkpoint.format,
        files=checkpoint.files,
        entries=checkpoint.entries,
        ties=tuple(tie for tie in ties if len(tie) > 1),
        objects=tuple(checkpoint.objects),
        metadata={k: v for k, v in checkpoint.metadata.items() if k != CHECKSUMS and k not in aliases},
        total_bytes=sum(by_dtype.values()),
        bytes_by_dtype=by_dtype,
        largest_group=max(_groups(once), key=lambda group: group.nbytes, default=None),
        checksums=_checksums(checkpoint),
    )


def dtype_name(entry: Entry) -> str:
    """The dtype, or how the bytes encode it."""
    return entry.encoding or str(entry.dtype).removeprefix("torch.")


def _checksums(checkpoint: Checkpoint) -> bool:
    if checkpoint.files == (checkpoint.path,):
        return CHECKSUMS in checkpoint.metadata
    return bool(checkpoint.files) and all(
        file.suffix == SUFFIX and CHECKSUMS in open_checkpoint(file).metadata for file in checkpoint.files
    )


def _groups(entries: Mapping[str, Entry]) -> list[Group]:
    """Form groups as Engine::form_groups does under the tightest budget.

    What one call needs at once is a group; so is each other large weight.

    Files that are sorted by name have a bias before its weight. Then it is not known which of several large
    weights of a module the small ones follow, and the largest is the one with which no install needs more.
    """
    small = max((entry.nbytes for entry in entries.values()), default=0) // 16
    modules: dict[str, list[str]] = {}
    for name in entries:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    groups: list[list[str]] = []
    for names, at_once in units_of_names(modules):
        if at_once:
            # The engine lays out weights of one file as they are there.
            groups.append(sorted(names, key=lambda name: (entries[name].file, entries[name].offset or 0)))
            continue
        if entries[names[0]].nbytes <= small:
            largest = max(names, key=lambda name: entries[name].nbytes)
            names = sorted(names, key=lambda name: name != largest and 1 + (entries[name].nbytes > small))
        together: list[str] = []
        for name in names:
            if entries[name].nbytes > small and any(entries[other].nbytes for other in together):
                groups.append(together)
                together = []
            together.append(name)
        groups.append(together)
    return [_group(names, entries) for names in groups if any(entries[name].nbytes for name in names)]


def _group(names: Iterable[str], entries: Mapping[str, Entry]) -> Group:
    end = 0
    for name in names:
        entry, begin = entries[name], align_up(end, _WEIGHT_ALIGNMENT)
        # What the engine reads straight to where it belongs keeps its place within a sector.
        if entry.nbytes >= _IN_PLACE_BYTES and entry.offset and entry.offset % _WEIGHT_ALIGNMENT == 0:
            begin += (entry.offset - begin) % ALIGNMENT
        end = begin + entry.nbytes
    return Group(tuple(names), max(align_up(end), ALIGNMENT))


@dataclass(frozen=True)
class Row:
    """Entries with one name but for its numbers, and one dtype and shape."""

    #: Such as ``layers.{0..31}.weight``.
    pattern: str
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def rows(found: Summary, *, collapse: bool = True) -> list[Row]:
    """The entries, with those of repeated layers as one.

    Parameters
    ----------
    found
        A summary.
    collapse
        False gives each entry a row.
    """
    alike: dict[object, list[str]] = {}
    for name, entry in found.entries.items():
        key = (key_of(name), dtype_name(entry), entry.shape) if collapse else name
        alike.setdefault(key, []).append(name)
    return [
        Row(
            pattern_of(names),
            tuple(names),
            dtype_name(found.entries[names[0]]),
            found.entries[names[0]].shape,
            sum(found.entries[name].nbytes for name in names),
        )
        for names in alike.values()
    ]
