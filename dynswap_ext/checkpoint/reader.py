"""An open checkpoint of any format: entries by name, and tensors that are mapped and not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

#: The encoding of entries that are coded without loss. They are plain values in all but their bytes.
LOSSLESS: Final = "lossless"


@dataclass(frozen=True, slots=True)
class Entry:
    """The description of one tensor in a checkpoint, which is known before the tensor is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Bytes in the file. With an `encoding`, they differ from those that shape and dtype give.
    nbytes: int
    file: Path
    #: Bytes from the start of `file` to the elements, in row-major order; None if the tensor is not one such
    #: range of one file. Entries that differ in nothing but the name are one tensor (`tie_identity`).
    offset: int | None
    #: The name of the encoding of the bytes, such as "Q4_K"; empty if they are plain values of `dtype`.
    encoding: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the bytes stand for exactly these values of `dtype`, plain or coded without loss."""
        return self.encoding in ("", LOSSLESS)

    @property
    def used_bytes(self) -> int:
        """Bytes when the tensor is computed with: the file's, or those of the values if they were coded."""
        return prod(self.shape) * self.dtype.itemsize if self.encoding == LOSSLESS else self.nbytes


@dataclass(eq=False, repr=False)
class Checkpoint(Mapping[str, Any]):
    """An open checkpoint, as a mapping from names to tensors. Only headers were read to open it."""

    #: The file that was opened: the checkpoint, or the index of its shards. A folder that the user named has
    #: been resolved to the file in it; only that of a distributed checkpoint stays.
    path: Path
    #: The name of the format, such as "safetensors" or "gguf".
    format: str
    #: The entry of each tensor, in the order of the file.
    entries: dict[str, Entry]
    #: All files that hold bytes of tensors.
    files: tuple[Path, ...]
    #: ``tensor(name)`` returns the tensor of an entry: a view of a private mapping of its file. A tensor that
    #: a distributed checkpoint has in chunks is put together in memory, at each call. Raises a SourceError
    #: that names file and entry if the bytes are not what the header says.
    tensor: Callable[[str], torch.Tensor]
    #: Text that the file has in addition to its tensors.
    metadata: dict[str, str] = field(default_factory=dict)
    #: Values that are no tensors: extra state, under keys that end in ``_extra_state``.
    objects: dict[str, Any] = field(default_factory=dict)
    #: Versions of the modules that wrote the checkpoint, as in ``state_dict()._metadata``; None if the format
    #: does not have them.
    versions: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.tensor(name) if name in self.entries else self.objects[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries or name in self.objects

    def __iter__(self) -> Iterator[str]:
        yield from self.entries
        yield from self.objects

    def __len__(self) -> int:
        return len(self.entries) + len(self.objects)
