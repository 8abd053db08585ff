"""Writes any checkpoint as safetensors, cast, sharded or renamed, in little memory, and resumes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from dynswap_ext._progress import ProgressOption, shown
from dynswap_ext.checkpoint.formats import open_checkpoint
from dynswap_ext.checkpoint.reader import Checkpoint
from dynswap_ext.checkpoint.rename import Rename
from dynswap_ext.checkpoint.writing.blocks import Block, BlockWriter
from dynswap_ext.checkpoint.writing.direct import check_free, explained
from dynswap_ext.checkpoint.writing.journal import Journal
from dynswap_ext.checkpoint.writing.layout import DEFAULT_SHARD, Layout, shard_bytes, split
from dynswap_ext.checkpoint.writing.pieces import pieces_of, text_of
from dynswap_ext.checkpoint.writing.sources import Files
from dynswap_ext.checkpoint.writing.target import Partial, Target
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
    #: Of `written_bytes`, what an interrupted run had done before and was found whole.
    resumed_bytes: int
    seconds: float


def convert(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    rename: Rename | None = None,
    progress: ProgressOption | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Write a checkpoint of any format as safetensors.

    Memory stays within some 40 MB, whatever the size. Each block of 4 MiB is read back from the disk and
    compared by checksum; the checksums are kept in the header for `verify`. What an interrupted run has
    done is not done again: run it again with the same arguments.

    Parameters
    ----------
    src
        Whatever `load` takes.
    dst
        ``*.safetensors`` for one file, any other path for a folder with shards and an index.
    dtype
        A floating dtype for floating tensors, as `tensor.to` casts. Integers, booleans and complex
        tensors stay what they are.
    max_shard_size
        Bytes, or a size such as ``"5GB"``, of the tensors of one shard. Default: one file, in a folder 5 GB.
    rename
        As in `load`. Also the way to leave entries out.
    progress
        True shows a bar where stderr is a terminal or a notebook. A function is called with the bytes written
        so far, those found done included, and the whole.
    overwrite
        Replace a checkpoint that is there, and drop what was begun with other arguments.

    Returns
    -------
    Conversion
        What was written.

    Raises
    ------
    ConfigError
        The destination exists or is the source, was begun with other arguments, or the source has what
        safetensors cannot hold.
    SourceError
        The source cannot be read or has changed meanwhile, the disk is full or does not keep what is written.

    After an error or a crash the destination is as it was. What was done so far is in a folder beside it,
    which the error names; the same call goes on from there.
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
        with shown(progress, "converting") as told:
            run = _Run(checkpoint, stamps, target, layouts, told)
            path, written = run(overwrite)
    return Conversion(
        path=path,
        files=tuple(written),
        tensors=len(pieces),
        source_bytes=sum(entry.nbytes for entry in checkpoint.entries.values()),
        written_bytes=run.whole,
        resumed_bytes=run.resumed,
        seconds=time.monotonic() - begun,
    )


class _Run:
    """One conversion, planned."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stamps: list[Any],
        target: Target,
        layouts: list[Layout],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._checkpoint, self._stamps, self._target = checkpoint, stamps, target
        self._layouts, self._progress = layouts, progress
        self._done: dict[Block, int] = {}
        self.whole = sum(layout.data_bytes for layout in layouts)
        self.resumed = 0

    def __call__(self, overwrite: bool) -> tuple[Path, list[Path]]:
        """Write, and take the destination's place; what can be loaded, and the files."""
        needed = sum(layout.file_bytes for layout in self._layouts)
        target = self._target
        with explained(target.path, target.folder, needed):
            partial = Partial(target)
            try:
                known = self._begun(partial, overwrite)
            except BaseException:
                partial.close()
                raise
        keep = True
        try:
            with explained(target.path, target.folder, needed):
                paths = partial.files(len(self._layouts))
                self._fill(partial, paths, known, needed)
                result = partial.place(paths, self._layouts)
            keep = False
            return result
        except BaseException as error:
            keep = bool(self._done)
            if not keep or not isinstance(error, DynswapError):
                raise
            raise type(error)(
                f"{error}. What is done so far is kept in {partial.folder}, and the same call goes on from "
                "there; delete that folder to drop it"
            ) from error
        finally:
            if keep:
                partial.close()
            else:
                partial.remove()

    def _begun(self, partial: Partial, overwrite: bool) -> dict[Block, int]:
        """Blocks that an earlier run says it has done."""
        journal = Journal(partial.folder / _JOURNAL)
        if journal.exists():
            job, done = journal.read()
            if job == self._job():
                return {block: done[block] for block in done if self._exists(block)}
            if done and not overwrite:
                raise ConfigError(
                    f"{partial.folder} has a part of {self._target.path} from another source, one that has "
                    "changed since, or with other arguments; give those again to go on, delete the folder, "
                    "or overwrite (--overwrite, overwrite=True) to start afresh"
                )
        partial.empty()
        return {}

    def _fill(self, partial: Partial, paths: list[Path], known: dict[Block, int], needed: int) -> None:
        self._done = known  # not to be dropped should there be no room
        check_free(self._target.path, partial.folder, needed - _taken(paths))
        writer = BlockWriter(self._layouts, paths, verify=True)
        writer.allocate()
        with closing(writer.present(known)) as present:
            self._done = dict(present)
        self.resumed = sum(map(self._size, self._done))
        position = self.resumed
        with Journal(partial.folder / _JOURNAL).begin(self._job(), self._done) as journal:
            self._tell(position)
            missing = (block for block in writer.all_blocks() if block not in self._done)
            with closing(writer.write(missing)) as written:
                for block, checksum in written:
                    self._done[block] = checksum
                    journal.add(block, checksum)
                    position += self._size(block)
                    self._tell(position)
        if _stamps(self._checkpoint) != self._stamps:
            self._done.clear()
            raise SourceError(
                f"{self._checkpoint.path} has changed while it was converted; convert it again when nobody "
                "writes to it"
            )
        writer.finish(self._done)

    def _size(self, block: Block) -> int:
        return self._layouts[block.file].block(block.number)[1]

    def _exists(self, block: Block) -> bool:
        return 0 <= block.file < len(self._layouts) and 0 <= block.number < self._layouts[block.file].blocks

    def _tell(self, position: int) -> None:
        if self._progress is not None:
            self._progress(position, self.whole)

    def _job(self) -> Any:
        """What has to be equal for a run to go on with the work of another."""
        plan = hashlib.sha256()
        for layout in self._layouts:
            plan.update(layout.header([0] * layout.blocks))
        return {"source": self._stamps, "files": len(self._layouts), "plan": plan.hexdigest()}


def _taken(paths: list[Path]) -> int:
    """Bytes that the disk has given already."""
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


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
