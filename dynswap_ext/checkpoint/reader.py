"""What every checkpoint format gives: entries by name, and tensors that are mapped and not read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch


@dataclass(frozen=True, slots=True)
class Entry:
    """What a checkpoint says of one tensor before any of it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: As stored: with `encoding`, less or more than shape and dtype say.
    nbytes: int
    file: Path
    #: Bytes from the start of `file` to the elements, in row-major order; None if the tensor is not one such
    #: range of one file. Entries with equal file and offset are ties.
    offset: int | None
    #: How the bytes encode values of `dtype`, such as "Q4_K"; empty when they are those values.
    encoding: str = ""


class Checkpoint(Mapping[str, Any], ABC):
    """An open checkpoint: a mapping from names to tensors. Opening one reads headers and nothing else.

    Parameters
    ----------
    path
        What the user named: a file, an index, or a folder.
    entries
        The entry of each tensor, in the order of the file.
    files
        All the files that hold bytes of it.
    metadata
        Text that the file has in addition to its tensors.
    objects
        What else is in the mapping: extra state, under keys that end in ``_extra_state``.
    versions
        The versions of the modules that wrote it, as ``state_dict()._metadata`` has them, if the format does.
    """

    #: What the format is called.
    format: ClassVar[str]

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        *,
        files: tuple[Path, ...],
        metadata: Mapping[str, str] | None = None,
        objects: Mapping[str, Any] | None = None,
        versions: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.entries = dict(entries)
        self.files = files
        self.metadata = dict(metadata or {})
        self.objects = dict(objects or {})
        self.versions = versions

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of an entry: a view of a private mapping of its file.

        Where the bytes are not one range of one file, it is put together in memory, and a new one each time.

        Raises
        ------
        SourceError
            The bytes are not what the header says. Names file and entry.
        """

    def __getitem__(self, name: str) -> Any:
        return self.tensor(name) if name in self.entries else self.objects[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self.objects

    def __iter__(self) -> Iterator[str]:
        yield from self.entries
        yield from self.objects

    def __len__(self) -> int:
        return len(self.entries) + len(self.objects)
