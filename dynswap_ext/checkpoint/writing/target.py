"""Where a checkpoint is written, and how it takes the place of the one before: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynswap_ext.checkpoint.writing.layout import Layout, index_text
from dynswap_ext.errors import ConfigError, DynswapError, SourceError

SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_NOTE: Final = "renaming.json"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Target:
    """The files that one checkpoint may have: ``stem.safetensors``, or shards and their index."""

    folder: Path
    stem: str
    #: What the user named.
    path: Path
    #: The user named the one file, and not the folder or its index.
    one_file: bool

    @classmethod
    def of(cls, path: Path, *, sharded: bool) -> Target:
        """Read what a user named.

        Raises
        ------
        ConfigError
            A suffix that is not of safetensors.
        """
        path = Path(os.path.realpath(path))  # a link stays one
        if path.name.endswith(_INDEX):
            return cls(path.parent, path.name.removesuffix(_INDEX), path, False)
        if path.suffix == SUFFIX and not path.is_dir():
            return cls(path.parent, path.name.removesuffix(SUFFIX), path, not sharded)
        if path.suffix and not path.is_dir() and path.suffix[1:].isalpha():
            raise ConfigError(
                f"{path} ends in {path.suffix}; expected a path that ends in {SUFFIX}, or a folder for shards"
            )
        return cls(path, "model", path, False)

    @property
    def file(self) -> Path:
        """The one file of a checkpoint that has one."""
        return self.folder / (self.stem + SUFFIX)

    @property
    def index(self) -> Path:
        """The index of one that is sharded."""
        return self.folder / (self.stem + _INDEX)

    def exists(self) -> Path | None:
        """The file that would be replaced."""
        candidates = [self.file] if self.one_file else [self.index, self.file]
        return next((path for path in candidates if path.exists()), None)

    def shards(self) -> set[str]:
        """Names of files that the present index names; none of another folder."""
        try:
            named = set(json.loads(self.index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()
        return {name for name in named if isinstance(name, str) and name == Path(name).name}

    def shard_names(self, count: int) -> list[str]:
        """Names for so many shards, none of which is taken: the index that there is stays valid."""
        generation = 1
        while True:
            stem = self.stem if generation == 1 else f"{self.stem}-v{generation}"
            names = [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
            if not any((self.folder / name).exists() for name in names):
                return names
            generation += 1


class Partial:
    """The folder of files that are not complete yet, `needed` bytes when they are. A context manager.

    Raises
    ------
    ConfigError
        Another process is writing there.
    """

    def __init__(self, target: Target, needed: int) -> None:
        self._target, self._needed = target, needed
        self.folder = target.folder / f".{target.stem}.dynswap-partial"
        #: If it is true at the end, the folder is kept with what is in it.
        self.keep: object = False
        self._created = [path for path in (target.folder, *target.folder.parents) if not path.exists()]
        if target.one_file and self._created:
            raise SourceError(f"{target.path} cannot be written: there is no folder {target.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            import fcntl  # not on every system

            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(
                f"another process is writing {target.path} (it has locked {self.folder}); wait for it"
            ) from None
        self._recover()

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._descriptor)
        for path in self._created:  # those that are empty
            with contextlib.suppress(OSError):
                path.rmdir()

    def files(self, count: int) -> list[Path]:
        """Paths for so many files."""
        return [self.folder / f"{number:05d}{SUFFIX}" for number in range(1, count + 1)]

    def empty(self) -> None:
        """Remove what is in the folder."""
        for path in self.folder.iterdir():
            path.unlink()

    def check_free(self) -> None:
        """Raise SourceError if what shall be written does not fit the disk."""
        taken = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        if shutil.disk_usage(self.folder).free < self._needed - taken:
            raise SourceError(_no_room(self._target, self._needed, "the disk is too full"))

    def place(self, layouts: Sequence[Layout]) -> tuple[Path, list[Path]]:
        """Let files that are complete take their place; what is there stays whole until then.

        Returns
        -------
        tuple
            What can be loaded, and the files.
        """
        target, paths = self._target, self.files(len(layouts))
        if target.one_file:
            self.replace(paths[0], target.file)
            return target.file, [target.file]
        names = target.shard_names(len(paths)) if len(paths) > 1 else []
        replaced = target.shards() | ({target.file.name} if names else set())
        renames = [(path.name, name) for path, name in zip(paths, names, strict=False)]
        note = json.dumps({"renames": renames, "replaced": sorted(replaced)})
        (self.folder / _NOTE).write_text(note)  # for the run after a crash
        _sync_folder(self.folder)
        try:
            if not names:
                self.replace(paths[0], target.file)
                target.index.unlink(missing_ok=True)
                return target.file, [target.file]
            for there, name in renames:
                os.rename(self.folder / there, target.folder / name)
            index = self.folder / "index.json"
            with index.open("w") as file:
                file.write(index_text(layouts, names))
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(target.folder)
            self.replace(index, target.index)
            return target.index, [target.folder / name for name in names]
        finally:
            self._recover()

    def replace(self, path: Path, destination: Path) -> None:
        """Let one file take the place of another, so that it survives a power cut."""
        os.replace(path, destination)
        _sync_folder(destination.parent)

    def _recover(self) -> None:
        """End what was begun: with an index in place what it replaced goes, else shards come back."""
        note = self.folder / _NOTE
        try:
            noted: Any = json.loads(note.read_text())
        except (OSError, ValueError):
            return
        target = self._target
        names = {name for _, name in noted["renames"]}
        if names <= target.shards() and (names or not target.index.exists()):
            for name in set(noted["replaced"]) - names:
                with contextlib.suppress(OSError):  # the new checkpoint is whole without it
                    (target.folder / name).unlink()
        else:
            for there, name in noted["renames"]:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(target.folder / name, self.folder / there)
        note.unlink()


@contextlib.contextmanager
def explained(target: Target, needed: int) -> Iterator[None]:
    """Turn errors of the system while `needed` bytes are written into SourceError."""
    path, folder = target.path, target.folder
    try:
        yield
    except DynswapError:
        raise
    except OSError as error:
        what = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        message = f"{path} cannot be written{where}: {what}"
        if error.errno in _NO_ROOM:
            message = _no_room(target, needed, what)
        elif error.errno in _REFUSED:
            message += f"; check the permissions of {folder}"
        raise SourceError(message) from error


def _no_room(target: Target, needed: int, why: str) -> str:
    free = ""
    with contextlib.suppress(OSError):
        free = f", and {target.folder} has {shutil.disk_usage(target.folder).free:,} free"
    return (
        f"{target.path} cannot be written: {why}. It needs {needed:,} bytes{free}; make room (limits on the "
        "size of files and quotas count too), or choose another folder"
    )


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
