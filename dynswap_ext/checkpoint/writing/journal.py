"""What of a conversion is done, kept beside the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynswap_ext.checkpoint.writing.blocks import Block


class Journal:
    """A file of lines: the conversion's description, then each finished block with its checksum.

    Lines are not forced to the disk: a line that is lost is work that is done again, and a block whose line
    is there is believed only if its bytes have that checksum.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        """Whether a conversion was begun."""
        return self._path.exists()

    def read(self) -> tuple[Any, dict[Block, int]]:
        """The description, None if it cannot be read, and the blocks."""
        first, *lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
        blocks = [(file, number, checksum) for line in lines for file, number, checksum in _block(line)]
        return _parsed(first), {Block(file, number): checksum for file, number, checksum in blocks}

    def begin(self, job: Any, done: dict[Block, int]) -> Journal:
        """Start anew with what is known to be done."""
        self._file = self._path.open("w", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(job) + "\n")
        for block, checksum in done.items():
            self.add(block, checksum)
        return self

    def add(self, block: Block, checksum: int) -> None:
        """A block is on the disk."""
        self._file.write(f"[{block.file},{block.number},{checksum}]\n")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _parsed(line: str) -> Any:
    """What a line says; None if the process ended in the middle of it."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _block(line: str) -> list[tuple[int, int, int]]:
    value = _parsed(line)
    whole = isinstance(value, list) and len(value) == 3 and all(type(number) is int for number in value)
    return [(value[0], value[1], value[2])] if whole else []
