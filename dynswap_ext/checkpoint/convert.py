"""Converts checkpoints of any format to safetensors, in little memory. Interrupted runs can be continued."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from dynswap_ext._util.listing import listed
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.progress import ProgressOption, shown
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.options import Rename, cast_to, check_dtype, renamed
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.checkpoint.summary import names_of_each, text_of
from dynswap_ext.checkpoint.writing.blocks import write
from dynswap_ext.checkpoint.writing.direct import Files
from dynswap_ext.checkpoint.writing.layout import Piece, split
from dynswap_ext.checkpoint.writing.lossless import coded
from dynswap_ext.checkpoint.writing.sources import Latest, from_file, from_tensor
from dynswap_ext.checkpoint.writing.target import Target
from dynswap_ext.errors import ConfigError, SourceError
from dynswap_ext.lossless.tensor import LosslessTensor


@dataclass(frozen=True)
class Conversion:
    """The result of `convert`: the files that it has written, and their sizes."""

    #: The path to load: the file, or the index of shards.
    path: Path
    #: All files that hold tensors.
    files: tuple[Path, ...]
    #: Tensors written. One that has several names counts once.
    tensors: int
    #: Bytes of all entries of the source, also of those that `rename` leaves out.
    source_bytes: int
    #: Bytes of the tensors in the result.
    written_bytes: int
    #: For each tensor that is coded without loss, by how much smaller that makes it, such as 1.41.
    ratios: Mapping[str, float]
    #: `written_bytes` without that code.
    decoded_bytes: int
    #: The part of `written_bytes` that an interrupted run had written and that was found intact.
    resumed_bytes: int
    #: How long the conversion took.
    seconds: float


@check_option_names
def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    rename: Rename | None = None,
    lossless: bool = False,
    progress: ProgressOption = False,
    overwrite: bool = False,
) -> Conversion:
    r"""Write a checkpoint of any format as safetensors.

    It takes some 40 MB of memory, for a checkpoint of any size. (A tensor that a distributed checkpoint has
    in chunks is put together in memory, one at a time, and so is one that is coded without loss.) Each block
    of 4 MiB is read back from the disk and compared by checksum. The checksums are kept in the header, for
    `verify`. After an interruption, the same call does only what is not done yet.

    Parameters
    ----------
    src
        A checkpoint of any format that `load` takes.
    dst
        ``*.safetensors`` for one file. Any other path is a folder, and gets one ``model.safetensors``, or
        shards and an index.
    dtype
        A floating dtype for floating tensors, which are cast as by `tensor.to`. Integer, boolean and complex
        tensors stay as they are.
    max_shard_size
        The most bytes of tensors in one shard, as a number or a size such as ``"5GB"``. Default: no limit for
        a file, 5 GB for a folder.
    rename
        From the source's names to new ones: a function, or rules as in ``{r"^module\.": ""}``. None as a new
        name leaves the entry out.
    lossless
        Write bfloat16, float32 and float16 tensors in a code without loss, in which trained weights take some
        30 %, 15 % and 10 % less. `load` and all else here read it as the same values, to the bit; other
        programs see the coded bytes. Each tensor is read twice. False writes plain tensors, also from coded
        ones.
    progress
        True shows a bar where stderr is a terminal or a notebook. A function is called with the bytes written
        so far, including those of an interrupted run, and the total.
    overwrite
        Replace an existing checkpoint, and drop an unfinished conversion that had other arguments.

    Returns
    -------
    Conversion
        What was written.

    Raises
    ------
    ConfigError
        The destination exists, is the source, or has an unfinished conversion with other arguments; an
        argument cannot be used; or the source has something that safetensors cannot hold.
    SourceError
        The source cannot be read, or has changed during the conversion; or the disk is full, or what is read
        back differs from what was written.

    Notes
    -----
    After an error or a crash the destination is as it was. What was done so far is kept in a hidden folder,
    next to the destination's file or in its folder. The error names it. The same call continues from there.
    """
    begun = time.monotonic()
    check_dtype(dtype)
    source, target = Path(src), Target.of(Path(dst), max_shard_size)
    checkpoint = open_checkpoint(source)
    _check_target(source, checkpoint, target, overwrite)
    with Files() as files, shown(progress, "converting") as report:
        pieces = _pieces(checkpoint, dtype, rename, files, lossless=lossless)
        if lossless:
            pieces = coded(pieces)
        layouts = split(pieces, target.shard, text_of(checkpoint))
        try:
            path, written, resumed = write(target, layouts, report, source=checkpoint, overwrite=overwrite)
        except SourceError as error:
            if not os.path.exists(target.journal):
                raise
            raise SourceError(
                f"{error}. What is done so far is kept in {target.partial}, and the same call continues from "
                "there; delete that folder to drop it"
            ) from error
    return Conversion(
        path=path,
        files=tuple(written),
        tensors=len(pieces),
        source_bytes=sum(entry.nbytes for entry in checkpoint.entries.values()),
        written_bytes=sum(layout.data_bytes for layout in layouts),
        ratios={piece.names[0]: piece.decoded_bytes / piece.nbytes for piece in pieces if piece.coded},
        decoded_bytes=sum(piece.decoded_bytes for piece in pieces),
        resumed_bytes=resumed,
        seconds=time.monotonic() - begun,
    )


def _pieces(
    checkpoint: Checkpoint, dtype: torch.dtype | None, rename: Rename | None, files: Files, *, lossless: bool
) -> list[Piece]:
    """Return the tensors to write, in the order of the checkpoint, with their new dtypes and names.

    A tensor that has several names is one piece.
    """
    names = names_of_each(checkpoint)
    everything = [*itertools.chain.from_iterable(names), *checkpoint.objects]
    new_names = {old: new for new, old in renamed(everything, rename).items()}
    others = [old for old in checkpoint.objects if old in new_names]
    if others:
        raise ConfigError(
            f"{checkpoint.path} holds what is no tensor ({listed(others)}), which safetensors cannot "
            "keep; leave it out with a rename function that returns None for it"
        )

    def in_memory(name: str) -> torch.Tensor:
        entry = checkpoint.entries[name]
        if not entry.encoding or entry.offset is None:
            return checkpoint.tensor(name)
        stored = torch.frombuffer(
            mmap.mmap(-1, entry.nbytes), dtype=torch.uint8
        )  # not the heap, that keeps it
        from_file(files, entry.file, entry.offset, torch.uint8)(0, stored)
        return LosslessTensor(stored, entry.dtype, entry.shape, f"{name} in {entry.file}")

    pieces, latest = [], Latest(in_memory)
    for old, *ties in names:
        kept = sorted(new_names[name] for name in (old, *ties) if name in new_names)
        if not kept:
            continue
        entry = checkpoint.entries[old]
        if not entry.is_exact:
            raise ConfigError(
                f"{old} in {checkpoint.path} is stored as {entry.encoding}, which safetensors has no "
                "dtype for; convert the checkpoint that it was made from"
            )
        as_stored = not entry.encoding or (lossless and cast_to(dtype, entry) == entry.dtype)
        if entry.offset is None or not as_stored:
            source = from_tensor(functools.partial(latest, old))
        else:
            of_file = torch.uint8 if entry.encoding else entry.dtype
            source = from_file(files, entry.file, entry.offset, of_file)
        if entry.encoding and as_stored:
            form = entry.dtype, entry.shape
            pieces.append(Piece(tuple(kept), torch.uint8, (entry.nbytes,), source, coded=form))
        else:
            pieces.append(Piece(tuple(kept), cast_to(dtype, entry), entry.shape, source))
    return pieces


def _check_target(source: Path, checkpoint: Checkpoint, target: Target, overwrite: bool) -> None:
    named = Path(os.path.realpath(source))
    inputs = {Path(os.path.realpath(path)) for path in checkpoint.files}
    outputs = {target.file, target.index, target.path, *(target.folder / name for name in target.shards())}
    inside = named.is_dir() and named in (target.folder, *target.folder.parents)
    if named in outputs or inputs & outputs or inside:
        raise ConfigError(
            f"{target.path} is the source itself, or inside it, or has files of it; convert to another path"
        )
    for path in [target.file] if target.shard is None else [target.index, target.file]:
        if os.path.exists(path) and not overwrite:
            raise ConfigError(
                f"{path} exists; overwrite it (--overwrite, overwrite=True), or convert to another path"
            )
