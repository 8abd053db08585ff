"""Explains why a file that a user has named cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

from dynswap_ext.errors import ConfigError, DynswapError


def check_folder(path: str | PathLike[str], what: str) -> Path:
    """Return the path of a file to write. Raises ConfigError if it is a folder, or if its folder is missing.

    `what` names the purpose of the file in the error, such as "picture".
    """
    where = Path(path)
    with explained(where):
        if not where.parent.is_dir():
            raise ConfigError(f"there is no folder {where.parent} for the {what} {where.name}; make it first")
        if where.is_dir():
            raise ConfigError(f"{where} is a folder; expected the name of a file for the {what}")
    return where


@contextmanager
def explained(path: Path, remedy: str = "choose another path") -> Iterator[None]:
    """Turn an OSError of the `with` block into a ConfigError that names path, reason and remedy."""
    try:
        yield
    except DynswapError:  # a SourceError is an OSError too
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; {remedy}") from error
