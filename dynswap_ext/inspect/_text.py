"""How the tables here are written: by rich on a terminal, and the same without colours as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

__all__ = ["amount", "as_text", "facts", "shape", "some", "table"]

#: Names that `some` tells.
_LISTED: Final = 10


def as_text(*parts: Any) -> str:
    """Render as text, as wide as the content wants."""
    from rich.console import Console

    # No terminal's width: who writes to a file or a log wants lines that are not broken.
    console = Console(file=io.StringIO(), width=10_000, color_system=None, force_terminal=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Any:
    """A table; the columns of `right` are aligned to the right. Texts are taken as they are, brackets too."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    numbers = set(right)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(Text(column), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def some(names: Sequence[str]) -> str:
    """Names, of which only the first are told if they are many."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def facts(rows: Iterable[tuple[str, str]]) -> Any:
    """Names and what there is to say to them, a line each."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    for name, text in rows:
        made.add_row(Text(name, style="bold"), Text(text))
    return made


def amount(size: int) -> str:
    """Bytes for a person, which may be fewer than there were before."""
    from dynswap_ext._memory import format_bytes

    return f"-{format_bytes(-size)}" if size < 0 else format_bytes(size)


def shape(sizes: Sequence[int]) -> str:
    """A shape as torch writes it."""
    return "[" + ", ".join(map(str, sizes)) + "]"
