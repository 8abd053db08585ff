"""A checkpoint's entries as what is to be written: cast, under other names, ties once."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from dynswap_ext.checkpoint.options import Rename, cast_to, renamed
from dynswap_ext.checkpoint.reader import Checkpoint, Entry
from dynswap_ext.checkpoint.writing.direct import Files
from dynswap_ext.checkpoint.writing.layout import CHECKSUMS, Piece
from dynswap_ext.checkpoint.writing.sources import Latest, from_file, from_tensor
from dynswap_ext.errors import ConfigError


def pieces_of(
    checkpoint: Checkpoint, dtype: torch.dtype | None, rename: Rename | None, files: Files
) -> list[Piece]:
    """Return what to write for a checkpoint, in its order.

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
    ties: dict[object, tuple[str, list[str]]] = {}
    for new, old in new_names.items():
        old = aliases.get(old, old)
        if entries[old].encoding:
            raise ConfigError(
                f"{old} in {checkpoint.path} is stored as {entries[old].encoding}, which safetensors has no "
                "dtype for; convert the checkpoint that it was made from"
            )
        ties.setdefault(tie_identity(old, entries[old]), (old, []))[1].append(new)
    pieces, latest = [], Latest(checkpoint.tensor)
    for old, names in ties.values():
        entry = entries[old]
        if entry.offset is None:
            source = from_tensor(functools.partial(latest, old))
        else:
            source = from_file(files, entry.file, entry.offset, entry.dtype)
        pieces.append(Piece(tuple(sorted(names)), cast_to(dtype, entry), entry.shape, source))
    return pieces


def text_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata to keep: all but ties and checksums, which are written again."""
    left_out = {CHECKSUMS, *ties_in_metadata(checkpoint.entries, checkpoint.metadata)}
    return {name: text for name, text in checkpoint.metadata.items() if name not in left_out}


def ties_in_metadata(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return names that safetensors.torch.save_model left out, each with the entry that has its tensor."""
    return {name: kept for name, kept in metadata.items() if name not in entries and kept in entries}


def tie_identity(name: str, entry: Entry) -> object:
    """Return what is equal for entries that are one tensor."""
    if entry.offset is None or entry.nbytes == 0:
        return name
    return entry.file, entry.offset, entry.dtype, entry.shape, entry.encoding
