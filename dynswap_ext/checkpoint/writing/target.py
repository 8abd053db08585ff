"""Where a checkpoint is written, and how it takes the place of the one before: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynswap_ext.checkpoint.writing.direct import sync_folder
from dynswap_ext.checkpoint.writing.layout import Layout, index_text
from dynswap_ext.errors import ConfigError, SourceError

SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_NOTE: Final = "renaming.json"


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

    @property
    def partial(self) -> Path:
        """The folder in which files are until they are complete; on the same file system."""
        return self.folder / f".{self.stem}.dynswap-partial"

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
    """The folder of files that are not complete yet; of one process at a time.

    Raises
    ------
    ConfigError
        Another process is writing there.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.folder = target.partial
        self._made = [path for path in (target.folder, *target.folder.parents) if not path.exists()]
        if target.one_file and self._made:
            raise SourceError(f"{target.path} cannot be written: there is no folder {target.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            self._lock()
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(
                f"another process is writing {target.path} (it has locked {self.folder}); wait for it"
            ) from None
        self._recover()

    def _lock(self) -> None:
        import fcntl  # not on every system

        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def files(self, count: int) -> list[Path]:
        """Paths for so many files."""
        return [self.folder / f"{number:05d}{SUFFIX}" for number in range(1, count + 1)]

    def empty(self) -> None:
        """Remove what is in the folder."""
        for path in self.folder.iterdir():
            path.unlink()

    def place(self, paths: Sequence[Path], layouts: Sequence[Layout]) -> tuple[Path, list[Path]]:
        """Let files that are complete take their place; what can be loaded, and the files."""
        if len(paths) == 1:
            path = self._replace_file(paths[0])
            return path, [path]
        names = self._target.shard_names(len(paths))
        index = self._replace_shards(paths, names, index_text(layouts, names))
        return index, [self._target.folder / name for name in names]

    def _replace_file(self, path: Path) -> Path:
        """Let a file that is complete take its place; what is there stays whole until then."""
        target = self._target
        if not target.one_file:
            self._note([], target.shards())
        os.replace(path, target.file)
        sync_folder(target.folder)
        if not target.one_file:
            target.index.unlink(missing_ok=True)
            self._recover()
        return target.file

    def _replace_shards(self, paths: Sequence[Path], names: Sequence[str], index: str) -> Path:
        """Let shards that are complete take their place, then the index; then remove what it replaced."""
        target = self._target
        self._note(
            [(path.name, name) for path, name in zip(paths, names, strict=True)],
            target.shards() | {target.file.name},
        )
        try:
            for path, name in zip(paths, names, strict=True):
                os.rename(path, target.folder / name)
            written = self.folder / "index.json"
            with written.open("w") as file:
                file.write(index)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(target.folder)
            os.replace(written, target.index)
            sync_folder(target.folder)
        finally:
            self._recover()
        return target.index

    def _note(self, renames: list[tuple[str, str]], replaced: set[str]) -> None:
        """Write down what is about to be done, for whoever comes after a crash."""
        (self.folder / _NOTE).write_text(json.dumps({"renames": renames, "replaced": sorted(replaced)}))
        sync_folder(self.folder)

    def _recover(self) -> None:
        """Ends what was begun: with an index in place what it replaced goes, else shards come back."""
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

    def close(self) -> None:
        """Let go of the folder and keep what is in it."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the folder, and those that were made for it and are empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()
