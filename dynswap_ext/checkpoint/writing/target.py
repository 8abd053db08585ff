"""The destination of a checkpoint. A new checkpoint replaces the previous one whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from dynswap_ext._util.memory import exact_bytes, parse_bytes
from dynswap_ext.checkpoint.writing.direct import file_control
from dynswap_ext.checkpoint.writing.layout import Layout
from dynswap_ext.errors import ConfigError, DynswapError, SourceError

SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
#: The default for the most bytes of a shard in a folder, which is that of huggingface_hub.
_SHARD: Final = 5_000_000_000


class Target:
    """The files of one checkpoint: ``stem.safetensors``, or shards and their index, in one folder.

    `path` is the path that the user gave. `shard` is the most bytes of tensors in one file; None for a single
    file without a limit.
    """

    def __init__(self, folder: Path, stem: str, path: Path, shard: int | None) -> None:
        self.folder, self.stem, self.path, self.shard = folder, stem, path, shard
        self.file = folder / (stem + SUFFIX)
        self.index = folder / (stem + _INDEX)
        #: The folder of files that are not complete yet. After an error it is kept if it has a journal.
        self.partial = folder / f".{stem}.dynswap-partial"
        self.journal = self.partial / "journal"
        self._note = self.partial / "renaming.json"

    @classmethod
    def of(cls, path: Path, max_shard_size: int | str | None = None) -> Target:
        """Make the target for a path that a user gave. ConfigError for a suffix or a size of no use."""
        limit = None if max_shard_size is None else _shard_bytes(max_shard_size)
        path = Path(os.path.realpath(path))  # a link is kept, and the file that it leads to is replaced
        if path.name.endswith(_INDEX):
            return cls(path.parent, path.name.removesuffix(_INDEX), path, limit or _SHARD)
        if path.suffix == SUFFIX and not os.path.isdir(path):
            return cls(path.parent, path.name.removesuffix(SUFFIX), path, limit)
        if path.suffix and not os.path.isdir(path) and path.suffix[1:].isalpha():
            raise ConfigError(
                f"{path} ends in {path.suffix}; expected a path that ends in {SUFFIX}, or a folder for shards"
            )
        return cls(path, "model", path, limit or _SHARD)

    def shards(self) -> set[str]:
        """Return the names of the shards in the present index, without those in other folders."""
        try:
            named = set(json.loads(self.index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()
        return {name for name in named if isinstance(name, str) and name == Path(name).name}

    @contextmanager
    def reserved(self, needed: int) -> Iterator[None]:
        """Make and lock the partial folder. An OSError inside becomes a SourceError.

        If there is not enough room, its message names the `needed` bytes.
        """
        try:
            with self._locked():
                yield
        except DynswapError:
            raise
        except OSError as error:
            what = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._no_room(needed, what) from error
            if error.filename:
                what += f" ({error.filename})"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                what += f"; check the permissions of {self.folder}"
            raise SourceError(f"{self.path} cannot be written: {what}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        control = file_control()
        created = [path for path in (self.folder, *self.folder.parents) if not os.path.exists(path)]
        if self.shard is None and created:
            raise SourceError(f"{self.path} cannot be written: there is no folder {self.folder}")
        self.partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.partial, os.O_RDONLY)
        try:
            control.flock(descriptor, control.LOCK_EX | control.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process is writing {self.path} (it has locked {self.partial}); wait for it"
            ) from None
        try:
            self._recover()
            yield
        finally:
            if not self.journal.exists():
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(descriptor)
            for path in created:
                with suppress(OSError):  # it is not empty
                    path.rmdir()

    def make_room(self, needed: int, *, keep: bool = False) -> None:
        """Empty the partial folder unless `keep`. SourceError if the disk lacks room for what is missing."""
        if not keep:
            for path in self.partial.iterdir():
                path.unlink()
        taken = sum(path.stat().st_blocks * 512 for path in self.partial.iterdir())
        if shutil.disk_usage(self.partial).free < needed - taken:
            raise self._no_room(needed, "the disk is too full")

    def _no_room(self, needed: int, why: str) -> SourceError:
        free = ""
        with suppress(OSError):
            free = f", and {self.folder} has {exact_bytes(shutil.disk_usage(self.folder).free)} free"
        return SourceError(
            f"{self.path} cannot be written: {why}. It needs {exact_bytes(needed)}{free}; make room (limits "
            "on the size of files and quotas count too), or choose another folder"
        )

    def place(self, parts: Mapping[Path, Layout]) -> tuple[Path, list[Path]]:
        """Move complete files to their places. Return the path to load, and the files.

        The index, or the only file, is moved last. Before that, the previous checkpoint is whole; after it,
        the new one is. If a crash comes in between, the next call reads the note and cleans up.
        """
        first, *others = parts
        if self.shard is None:
            replace(first, self.file)
            return self.file, [self.file]
        names = self._free_names(len(parts)) if others else []
        if names:
            last, loadable, other = self.partial / "index.json", self.index, self.file
            last.write_text(_index_text(dict(zip(names, parts.values(), strict=True))))
            sync(last)
        else:
            last, loadable, other = first, self.file, self.index
        replaced = [other.name, *(self.shards() - set(names))]
        renames = [(part.name, name) for part, name in zip(parts, names, strict=False)]
        self._note.write_text(json.dumps([last.name, renames, replaced]))
        sync(self.partial)
        try:
            for part, name in renames:
                os.rename(self.partial / part, self.folder / name)
            sync(self.folder)
            replace(last, loadable)
        finally:
            self._recover()
        return loadable, [self.folder / name for name in names] or [loadable]

    def _free_names(self, count: int) -> list[str]:
        """Return names for `count` shards that no file has, so that the present index stays valid."""
        generation = 1
        while True:
            stem = self.stem if generation == 1 else f"{self.stem}-v{generation}"
            names = [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
            if not any((self.folder / name).exists() for name in names):
                return names
            generation += 1

    def _recover(self) -> None:
        """Finish a replacement that was interrupted if its last file is in place; else undo it."""
        try:
            last, renames, replaced = json.loads(self._note.read_text())
        except (OSError, ValueError):
            return
        if (self.partial / last).exists():
            for part, name in renames:
                with suppress(FileNotFoundError):
                    os.rename(self.folder / name, self.partial / part)
        else:
            for name in replaced:
                with suppress(OSError):  # the new checkpoint is whole without it
                    (self.folder / name).unlink()
        self._note.unlink()


def replace(path: Path, destination: Path) -> None:
    """Replace a file by another, and wait until that would survive a power cut."""
    os.replace(path, destination)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Wait until the disk has the bytes of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _index_text(shards: Mapping[str, Layout]) -> str:
    weights = {piece.names[0]: name for name, layout in shards.items() for piece in layout.pieces}
    total = sum(layout.data_bytes for layout in shards.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(content, indent=2) + "\n"


def _shard_bytes(given: int | str) -> int:
    try:
        size = parse_bytes(given)
    except ConfigError:
        size = 0
    if not isinstance(size, int) or isinstance(given, float) or size < 1:
        raise ConfigError(f"max_shard_size is {given!r}; expected bytes, or a size such as '5GB' or '512MiB'")
    if size < 1 << 20 and not str(given).strip()[-1].isalpha():
        raise ConfigError(
            f"max_shard_size is {given!r}, a number without a unit; write a size such as '5GB', or "
            f"'{size}B' if so few bytes are intended"
        )
    return size
