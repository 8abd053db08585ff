"""From a path to an outline: a checkpoint's headers, or a config made into a model without weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from dynswap_ext._util.units import show_bytes
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Entry
from dynswap_ext.checkpoint.summary import place_of, units_of
from dynswap_ext.checkpoint.writing.pieces import tie_identity
from dynswap_ext.errors import SourceError
from dynswap_ext.planning.configs import config_in, model_of_config
from dynswap_ext.planning.weights import (
    Kind,
    Outline,
    PlannedWeight,
    cast_bytes,
    multiplied,
    outline_of_model,
)

__all__ = ["outline", "outline_of_checkpoint", "outline_of_config"]

#: How models call tables that rows are looked up in: the module's name, the last word before ".weight".
_TABLES: Final = frozenset(
    (
        *("embed_tokens", "embed_positions", "tok_embeddings", "token_embd", "token_embedding", "shared"),
        *("wte", "wpe", "embedding", "embeddings", "position_embedding", "position_embeddings"),
        *("word_embeddings", "token_type_embeddings", "relative_attention_bias"),
    )
)
#: Dtypes of what is no matrix, though it has rows and columns: indices, masks, positions.
_NOT_MULTIPLIED: Final = frozenset((torch.bool, torch.int16, torch.int32, torch.int64))
_DIFFUSION: Final = re.compile(
    r"transformer_blocks\.|double_blocks\.|joint_blocks\.|x_embedder\.|patch_embedding\."
)
_EXPERTS: Final = re.compile(r"(^|\.)(experts|ffn_(gate|up|down)_exps)(\.|$)")


def outline(path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False) -> Outline:
    """Outline a checkpoint or a config. Of a checkpoint nothing is read but headers.

    Parameters
    ----------
    path
        What `checkpoint.load` takes; or a ``config.json`` of transformers or diffusers, or a folder with one
        and no checkpoint.
    dtype
        As for `install`: what floating weights are on the device.
    disk
        Copies read masters from a disk, which moves them as they are stored.

    Raises
    ------
    SourceError
        It is neither, or cannot be read.
    ConfigError
        The config's library is not installed, or has no such model.
    """
    config = config_in(Path(path))
    if config is not None:
        return outline_of_config(config, dtype=dtype, disk=disk)
    return outline_of_checkpoint(path, dtype=dtype, disk=disk)


def outline_of_config(
    path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False
) -> Outline:
    """Outline the model that a ``config.json`` describes: it is made on the meta device, without weights.

    Raises
    ------
    SourceError
        There is no such file, or it is no config.
    ConfigError
        The config's library is not installed, or has no such model.
    """
    made = model_of_config(Path(path))
    # Checkpoints of a model whose config names no dtype come in several.
    stored = made.stored or dtype
    found = outline_of_model(
        made.model, title=made.title, dtype=dtype, stored=stored, disk=disk, share=made.share
    )
    unknown = "The config names no dtype: float32, unless --dtype says otherwise."
    notes = made.notes if stored is not None else (*made.notes, unknown)
    rows, rows_as = _rows(weight.name for weight in found.weights)
    return dataclasses.replace(found, notes=notes, rows=rows, rows_as=rows_as)


def outline_of_checkpoint(
    path: str | PathLike[str], *, dtype: torch.dtype | None = None, disk: bool = False
) -> Outline:
    """Return the weights from the headers of a checkpoint of any format.

    Notes
    -----
    Weights of one module are those with the same name up to the last dot. The order is the file's, unless
    that is the order of names as text, which says nothing: then numbers in names are compared as numbers.

    Raises
    ------
    SourceError
        It cannot be read.
    """
    checkpoint = open_checkpoint(Path(path))
    names: dict[object, str] = {}
    for name, entry in checkpoint.entries.items():
        if torch.Size(entry.shape).numel():
            names.setdefault(tie_identity(name, entry), name)
    entries = {name: checkpoint.entries[name] for name in names.values()}
    if not entries:
        raise SourceError(
            f"{path} has no tensors, so there is nothing to plan for; name the file with the weights"
        )
    by_name = _sorted_as_text(entries)
    units = units_of(entries)
    if by_name:
        units.sort(key=lambda unit: min(map(_natural, unit[0])))
    weights = []
    for unit, (members, at_once) in enumerate(units):
        norm = all(len(entries[name].shape) < 2 for name in members)
        found = [_weight(name, entries[name], unit, norm, dtype, disk=disk) for name in members]
        weights += [dataclasses.replace(weight, at_once=at_once) for weight in found]
    notes = []
    if any(_EXPERTS.search(name) for name in entries):
        notes.append(
            "The names are those of a mixture of experts: compute and copies are counted as if every row "
            "went through every expert. A config, unlike a checkpoint, has their number; --model measures."
        )
    stored = sum(entry.nbytes for entry in entries.values())
    title = f"{Path(path)}: {checkpoint.format}, {len(weights)} weights, {show_bytes(stored)} in the file"
    order = "by name, with numbers in numeric order" if by_name else "as in the file"
    return Outline(title, tuple(weights), order, tuple(notes), checkpoint.files, *_rows(entries))


def _rows(names: Iterable[str]) -> tuple[int, str]:
    """Return the rows of a pass where none are given: an image's, if names are those of a diffusion model."""
    if any(_DIFFUSION.search(name) for name in names):
        return 4096, "an image of 1024 x 1024"
    return 1, "one token, as in decoding"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key under which "layers.2" is before "layers.10"."""
    words = re.split(r"(\d+)", name)
    return tuple((int(word), "") if word.isdecimal() else (-1, word) for word in words)


def _sorted_as_text(entries: Mapping[str, Entry]) -> bool:
    """Say whether the files have them by name. safetensors sorts by the width of the dtype first."""
    parts: dict[object, list[str]] = {}
    for name, entry in entries.items():
        parts.setdefault((entry.file, entry.dtype), []).append(name)
    return all(part == sorted(part) for part in parts.values())


def _weight(
    name: str, entry: Entry, unit: int, norm: bool, dtype: torch.dtype | None, *, disk: bool
) -> PlannedWeight:
    elements = torch.Size(entry.shape).numel()
    if entry.encoding:  # streams as it is stored, and is decoded by the operation that uses it
        nbytes = moved = entry.nbytes
    else:
        nbytes, moved = cast_bytes(entry.nbytes, elements, entry.dtype, dtype, disk=disk)
    kind: Kind = "norm" if norm else "vector"
    if entry.dtype in _NOT_MULTIPLIED:
        kind = "lookup"
    elif len(entry.shape) >= 2:
        module = name.rpartition(".")[0].rpartition(".")[2]
        kind = "lookup" if module in _TABLES else multiplied(name)
    cast = not entry.encoding and dtype not in (None, entry.dtype) and entry.dtype.is_floating_point
    place = place_of(entry, cast=cast) if disk else None
    return PlannedWeight(name, nbytes, moved, unit, kind, elements, place=place)
