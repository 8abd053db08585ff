"""Writes any checkpoint as safetensors: cast, sharded or renamed, in little memory, and resumable."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext._util.progress import ProgressOption, shown
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.checkpoint.rename import Rename
from dynswap_ext.checkpoint.writing.blocks import Block, BlockWriter, Journal
from dynswap_ext.checkpoint.writing.layout import DEFAULT_SHARD, Layout, shard_bytes, split
from dynswap_ext.checkpoint.writing.pieces import pieces_of, text_of
from dynswap_ext.checkpoint.writing.sources import Files
from dynswap_ext.checkpoint.writing.target import Partial, Target, explained
from dynswap_ext.errors import ConfigError, DynswapError, SourceError

_JOURNAL: Final = "journal"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did."""

    #: What can be loaded: the file, or the index of shards.
    path: Path
    #: Each file with tensors in it.
    files: tuple[Path, ...]
    #: Entries written.
    tensors: int
    #: Bytes of tensors, before and after.
    source_bytes: int
    written_bytes: int
    #: Of `written_bytes`, what an interrupted run had written and was found intact.
    resumed_bytes: int
    seconds: float


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    rename: Rename | None = None,
    progress: ProgressOption = False,
    overwrite: bool = False,
) -> Conversion:
    """Write a checkpoint of any format as safetensors.

    It takes some 40 MB of memory, for a checkpoint of any size. Each block of 4 MiB is read back from the
    disk and compared by checksum; the checksums are kept in the header for `verify`. After an interruption,
    the same call again does only what is not done yet.

    Parameters
    ----------
    src
        A checkpoint of any format that `load` takes.
    dst
        ``*.safetensors`` for one file, any other path for a folder with shards and an index.
    dtype
        A floating dtype for floating tensors, which are cast as by `tensor.to`. Integer, boolean and complex
        tensors stay as they are.
    max_shard_size
        The most bytes of tensors in one shard, as a number or a size such as ``"5GB"``. Default: no limit for
        a file, 5 GB for a folder.
    rename
        As in `load`, where None leaves an entry out.
    progress
        True shows a bar where stderr is a terminal or a notebook. A function is called with the bytes written
        so far, including those of an interrupted run, and the total.
    overwrite
        Replace an existing checkpoint, and drop what was begun with other arguments.

    Returns
    -------
    Conversion
        What was written.

    Raises
    ------
    ConfigError
        The destination exists, is the source, or was begun with other arguments; or the source has something
        that safetensors cannot hold.
    SourceError
        The source cannot be read, or has changed during the conversion; or the disk is full, or does not
        keep what is written.

    Notes
    -----
    After an error or a crash the destination is as it was. What was done so far is in a folder next to it,
    which the error names; the same call continues from there.
    """
    begun = time.monotonic()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype is {dtype!r}; expected a floating dtype such as torch.bfloat16, or None")
    limit = shard_bytes(max_shard_size)
    source, target = Path(src), Target.of(Path(dst), sharded=limit is not None)
    checkpoint = open_checkpoint(source)
    _check_target(source, checkpoint, target, overwrite)
    stamps = _stamps(checkpoint)
    with Files() as files:
        pieces = pieces_of(checkpoint, dtype, rename, files)
        layouts = split(pieces, limit if target.one_file else limit or DEFAULT_SHARD, text_of(checkpoint))
        needed = sum(layout.file_bytes for layout in layouts)
        done: dict[Block, int] = {}
        try:
            with (
                shown(progress, "converting") as report,
                explained(target, needed),
                Partial(target, needed) as partial,
            ):
                partial.keep = True
                job = _job(stamps, layouts)
                done.update(_begun(partial, job, target, layouts, overwrite))
                partial.keep = done  # not to be dropped should there be no room
                resumed = _fill(partial, checkpoint, job, layouts, done, report)
                loadable, written = partial.place(layouts)
                partial.keep = False
        except DynswapError as error:
            if not done:
                raise
            raise type(error)(
                f"{error}. What is done so far is kept in {partial.folder}, and the same call continues from "
                "there; delete that folder to drop it"
            ) from error
    return Conversion(
        path=loadable,
        files=tuple(written),
        tensors=len(pieces),
        source_bytes=sum(entry.nbytes for entry in checkpoint.entries.values()),
        written_bytes=sum(layout.data_bytes for layout in layouts),
        resumed_bytes=resumed,
        seconds=time.monotonic() - begun,
    )


def _job(stamps: Any, layouts: list[Layout]) -> Any:
    """Return what has to be equal for a run to continue the work of another."""
    plan = hashlib.sha256()
    for layout in layouts:
        plan.update(layout.header([0] * layout.blocks))
    return {"source": stamps, "files": len(layouts), "plan": plan.hexdigest()}


def _begun(
    partial: Partial, job: Any, target: Target, layouts: list[Layout], overwrite: bool
) -> dict[Block, int]:
    """Return the blocks, with checksums, that the journal of an earlier run has."""
    journal = partial.folder / _JOURNAL
    if journal.exists():
        earlier, done = Journal.read(journal)
        if earlier == job:
            return done
        if done and not overwrite:
            raise ConfigError(
                f"{partial.folder} has a part of {target.path} from another source, one that has changed "
                "since, or with other arguments; repeat those to continue, delete the folder, or overwrite "
                "(--overwrite, overwrite=True) to start afresh"
            )
    partial.empty()
    return {}


def _fill(
    partial: Partial,
    checkpoint: Checkpoint,
    job: Any,
    layouts: list[Layout],
    done: dict[Block, int],
    report: Callable[[int, int], None] | None,
) -> int:
    """Write the blocks that are not done, and note them in `done`. Return the bytes that were done before."""
    partial.check_free()
    writer = BlockWriter(layouts, partial.files(len(layouts)), verify=True)
    writer.allocate()
    present = writer.present(done)
    done.clear()
    done.update(present)
    whole = sum(layout.data_bytes for layout in layouts)
    resumed = position = sum(layouts[block.file].block(block.number)[1] for block in done)
    with Journal(partial.folder / _JOURNAL, job, done) as journal:

        def finished(block: Block, checksum: int) -> None:
            nonlocal position
            done[block] = checksum
            journal.add(block, checksum)
            position += layouts[block.file].block(block.number)[1]
            if report is not None:
                report(position, whole)

        if report is not None:
            report(position, whole)
        writer.write([block for block in writer.all_blocks() if block not in done], finished)
    if _stamps(checkpoint) != job["source"]:
        done.clear()
        raise SourceError(
            f"{checkpoint.path} has changed while it was converted; convert it again when no program writes "
            "to it"
        )
    writer.finish(done)
    return resumed


def _check_target(source: Path, checkpoint: Checkpoint, target: Target, overwrite: bool) -> None:
    named, inputs = (
        Path(os.path.realpath(source)),
        {Path(os.path.realpath(path)) for path in checkpoint.files},
    )
    outputs = {target.file, target.index, target.path}
    if named in outputs or inputs & outputs:
        raise ConfigError(f"{target.path} is the source itself, or a file of it; convert to another path")
    if named.is_dir() and (target.folder == named or named in target.folder.parents):
        raise ConfigError(f"{target.path} is inside the source, {source}; convert to a path outside it")
    if target.shards() & {path.name for path in inputs if path.parent == target.folder}:
        raise ConfigError(f"{target.index} names files of the source, {source}; convert to another folder")
    there = target.exists()
    if there is not None and not overwrite:
        raise ConfigError(
            f"{there} exists; overwrite it (--overwrite, overwrite=True), or convert to another path"
        )


def _stamps(checkpoint: Checkpoint) -> list[Any]:
    """What tells whether a source has changed."""
    found: list[Any] = []
    for path in checkpoint.files:
        try:
            status = path.stat()
        except OSError as error:
            raise SourceError(f"{path} cannot be read any more: {error.strerror}") from error
        found.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    return found
