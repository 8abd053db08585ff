"""A checkpoint's entries as what is to be written: cast, under other names, ties once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.checkpoint.rename import Rename, renamed
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS, Piece, check_dtype
from dynswap_ext.checkpoint.writing.sources import (
    Assembled,
    FileRange,
    Files,
    Latest,
    Mappings,
    Source,
    TensorRange,
)
from dynswap_ext.errors import ConfigError


def pieces_of(
    checkpoint: Checkpoint, dtype: torch.dtype | None, rename: Rename | None, files: Files
) -> list[Piece]:
    """What to write for a checkpoint, in its order.

    Raises
    ------
    ConfigError
        An entry cannot go into safetensors. Names it.
    """
    entries, aliases = checkpoint.entries, ties_in_metadata(checkpoint.entries, checkpoint.metadata)
    new_names = renamed([*entries, *aliases, *checkpoint.objects], rename)
    others = [old for old in new_names.values() if old in checkpoint.objects]
    if others:
        raise ConfigError(
            f"{checkpoint.path} holds what is no tensor ({', '.join(others[:5])}), which safetensors cannot "
            "keep; leave it out with a rename function that returns None for it"
        )
    sources = _Sources(checkpoint, files)
    ties: dict[object, list[str]] = {}
    first: dict[object, str] = {}
    for new, old in new_names.items():
        old = aliases.get(old, old)
        _check(checkpoint, old)
        identity = sources.identity(old)
        first.setdefault(identity, old)
        ties.setdefault(identity, []).append(new)
    pieces = []
    for identity, names in ties.items():
        old = first[identity]
        entry = entries[old]
        target = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        check_dtype(old, target)
        pieces.append(Piece(tuple(sorted(names)), target, entry.shape, sources.source(old)))
    return pieces


def text_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Metadata to keep: all but ties and checksums, which are made anew."""
    gone = {CHECKSUMS, *ties_in_metadata(checkpoint.entries, checkpoint.metadata)}
    return {
        name: text
        for name, text in checkpoint.metadata.items()
        if name not in gone and isinstance(name, str) and isinstance(text, str)
    }


def ties_in_metadata(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, str]:
    """Names that safetensors.torch.save_model left out, each with the entry that has its tensor."""
    return {name: kept for name, kept in metadata.items() if name not in entries and kept in entries}


def tie_identity(name: str, entry: Entry) -> object:
    """What is equal for entries that are one tensor."""
    if entry.offset is None or entry.nbytes == 0:
        return name
    return entry.file, entry.offset, entry.dtype, entry.shape, entry.encoding


def _check(checkpoint: Checkpoint, name: str) -> None:
    entry = checkpoint.entries[name]
    if entry.encoding:
        raise ConfigError(
            f"{name} in {checkpoint.path} is stored as {entry.encoding}, which safetensors has no dtype "
            "for; convert the checkpoint that it was made from"
        )


class _Sources:
    """Where each entry's bytes are. An entry without a place in a file is asked for it once."""

    def __init__(self, checkpoint: Checkpoint, files: Files) -> None:
        self._checkpoint, self._files = checkpoint, files
        self._found: dict[str, tuple[object, Source]] = {}
        self._latest = Latest()
        self._mappings: Mappings | None = None
        self._assembles = False

    def identity(self, name: str) -> object:
        """What is equal for entries that are one tensor."""
        return self._find(name)[0]

    def source(self, name: str) -> Source:
        """How to read it."""
        return self._find(name)[1]

    def _find(self, name: str) -> tuple[object, Source]:
        if name not in self._found:
            entry = self._checkpoint.entries[name]
            if entry.offset is not None:
                source: Source = FileRange(self._files, entry.file, entry.offset, entry.dtype)
                self._found[name] = tie_identity(name, entry), source
            else:
                self._found[name] = self._without_place(name)
        return self._found[name]

    def _without_place(self, name: str) -> tuple[object, Source]:
        make: Any = functools.partial(self._checkpoint.tensor, name)
        if not self._assembles:
            tensor = self._checkpoint.tensor(name).detach()
            if self._mappings is None:
                self._mappings = Mappings()
            mapped, place = self._mappings.find(tensor)
            identity = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if place is not None:  # nobody has written to it: the file has all there is
                return identity, FileRange(self._files, place.path, place.offset, tensor.dtype)
            if mapped:
                return identity, TensorRange(tensor, mapped=True)
            # A format puts tensors together, or it does not: the others need not be read to see it.
            self._assembles = tensor.numel() > 0
        return name, Assembled(make, self._latest)
