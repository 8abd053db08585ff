"""Saves a model's masters as a checkpoint, which replaces the previous one when it is complete."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.subclasses import is_plain
from dynswap_ext._util.file_mappings import FileMappings
from dynswap_ext._util.listing import listed
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext.checkpoint.writing.blocks import write
from dynswap_ext.checkpoint.writing.direct import Files
from dynswap_ext.checkpoint.writing.layout import Piece, split
from dynswap_ext.checkpoint.writing.lossless import coded
from dynswap_ext.checkpoint.writing.sources import from_tensor, source_of
from dynswap_ext.checkpoint.writing.target import Target, replace, sync
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.lossless.tensor import LosslessTensor

#: Suffixes of files that are written with torch.save.
_TORCH: Final = (".pt", ".pth", ".bin")


@check_option_names
def save(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    lossless: bool = False,
) -> Path:
    """Write the state dict of a model, installed or not: its masters, with all changes to them.

    Parameters
    ----------
    model
        Any module. Masters that are mapped from a file are read from that file, not loaded into memory.
    path
        ``*.safetensors`` for one file; ``*.pt``, ``*.pth`` or ``*.bin`` for a file of ``torch.save``. Any
        other path is a folder (made if it does not exist), which gets a checkpoint as Hugging Face lays it
        out: one ``model.safetensors``, or shards and an index.
    max_shard_size
        The most bytes of tensors in one shard, as a number or a size such as ``"5GB"``; a larger model is
        split into shards. Default: no limit for a file, 5 GB for a folder.
    metadata
        Text to put into the header of each safetensors file.
    lossless
        Write bfloat16, float32 and float16 tensors in a code without loss, in which trained weights take some
        30 %, 15 % and 10 % less. `load` reads it as the same values, to the bit; other programs see the coded
        bytes. Masters that are coded already are written as they are; each other one is read twice.

    Returns
    -------
    Path
        The path to load: the file, or the index of shards.

    Raises
    ------
    ConfigError
        Something in the state dict does not fit the format (extra state, a tensor subclass, a dtype) or is on
        the meta device; an argument cannot be used; or another process is writing to `path`.
    SourceError
        A master cannot be read, permission is missing, or the disk is full. The message says how much room
        the checkpoint takes if there is not enough.

    Notes
    -----
    After any error, and after a crash, what was at `path` before is intact. After an error, no temporary file
    is left.

    The masters stay where they are: an install goes on streaming those in RAM from RAM. To stream them from
    the new file, `load` it into the model.

    Tied tensors (same memory, dtype, shape and strides) are written once, under the alphabetically first of
    their names. The metadata has the other names, as with ``safetensors.torch.save_model``. It also has a
    CRC-32 of each 4 MiB, for `verify`. Saving takes some 40 MB of memory on top of the model. ``torch.save``
    also reads all pages of mapped masters into memory, from which the system can drop them again.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"save() takes a torch.nn.Module, not a {type(model).__name__}")
    path = Path(path)
    if path.suffix in _TORCH and not os.path.isdir(path):
        if max_shard_size is not None or metadata or lossless:
            raise ConfigError(
                f"{path} would be a file of torch.save, which has neither shards nor metadata nor lossless "
                "tensors; leave out max_shard_size, metadata and lossless, or save to a path that ends in "
                ".safetensors"
            )
        return _save_torch(model.state_dict(), Path(os.path.realpath(path)))
    target, text = Target.of(path, max_shard_size), dict(metadata or {})
    wrong = [name for name, value in text.items() if not isinstance(name, str) or not isinstance(value, str)]
    if wrong:
        raise ConfigError(
            f"metadata has something else than text under {listed([*map(repr, wrong)])}; safetensors "
            "keeps only text, so write it as such (json.dumps)"
        )
    with Files() as files:
        pieces = _pieces(model.state_dict(), files, lossless=lossless)
        return write(target, split(coded(pieces) if lossless else pieces, target.shard, text))[0]


def _save_torch(state: dict[str, Any], path: Path) -> Path:
    _refuse_meta({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
    needed = sum(value.nbytes for value in state.values() if is_plain(value))
    target = Target(path.parent, path.name, path, None)
    with target.reserved(needed):
        target.make_room(needed)
        written = target.partial / path.name
        with written.open("wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # torch raises it for an OSError of the file
                file.seek(0, os.SEEK_END)
                cause = error.__cause__ or error.__context__
                if isinstance(cause, OSError):
                    raise cause from None
                raise SourceError(f"{path} cannot be written: {error}") from error
        sync(written)
        replace(written, path)
    return path


def _pieces(state: dict[str, Any], files: Files, *, lossless: bool) -> list[Piece]:
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(
            f"the model has state that is no tensor ({listed(others, 5)}), which safetensors cannot hold; "
            "save to a path that ends in .pt"
        )
    _refuse_meta(state)
    ties: dict[object, list[str]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, LosslessTensor):
            # Its data_ptr() would decode it for good.
            address = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        elif is_plain(tensor) and tensor.layout == torch.strided:
            address = tensor.data_ptr(), 0
        else:
            raise ConfigError(
                f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, and safetensors holds plain "
                "tensors alone; save to a path that ends in .pt, or replace it by a plain tensor"
            )
        bits = tensor.is_conj(), tensor.is_neg()
        place = tensor.device, address, tensor.dtype, tensor.shape, tensor.stride(), bits
        ties.setdefault(place if tensor.numel() else name, []).append(name)
    mappings = FileMappings()
    return [
        _piece(tuple(sorted(names)), state[names[0]].detach(), mappings, files, lossless=lossless)
        for names in ties.values()
    ]


def _piece(
    names: tuple[str, ...], tensor: torch.Tensor, mappings: FileMappings, files: Files, *, lossless: bool
) -> Piece:
    form = tensor.dtype, tuple(tensor.shape)
    if isinstance(tensor, LosslessTensor):
        if (stored := tensor.coded) is not None and tensor.is_whole() and lossless:
            source = source_of(stored, mappings, files)
            return Piece(names, torch.uint8, (stored.numel(),), source, coded=form)
        if (plain := tensor.plain) is None:
            return Piece(names, *form, from_tensor(lambda: tensor))
        tensor = plain
    return Piece(names, *form, source_of(tensor, mappings, files))


def _refuse_meta(tensors: Mapping[str, torch.Tensor]) -> None:
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"{len(meta)} tensor(s) are on the meta device and hold no data: {listed(meta, 5)}; load them "
            "first, for instance with dynswap_ext.checkpoint.load(model, path)"
        )
