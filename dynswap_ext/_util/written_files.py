"""Files that a user names and the package writes: what cannot be written is explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from dynswap_ext.errors import ConfigError, DynswapError


def check_folder(path: str | PathLike[str], what: str) -> Path:
    """Return the path of a file that is to be written, if its folder exists; else raise ConfigError."""
    where = Path(path)
    with explained(where):
        if not where.parent.is_dir():
            raise ConfigError(f"there is no folder {where.parent} for the {what} {where.name}; make it first")
        if where.is_dir():
            raise ConfigError(f"{where} is a folder; expected the name of a file for the {what}")
    return where


@contextmanager
def explained(path: Path, remedy: str = "choose another path") -> Iterator[None]:
    """Make an OSError inside a ConfigError that names the path, the reason and the remedy."""
    try:
        yield
    except DynswapError:  # a SourceError is an OSError too
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error
