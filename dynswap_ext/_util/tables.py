"""Tables: printed by rich on a terminal, and without colours as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

#: Names that are listed before the others are only counted.
_LISTED: Final = 10


class Printable:
    """Data that ``print`` shows as tables, and rich in colour."""

    def _parts(self) -> tuple[Any, ...]:
        """Return what is printed, for rich."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(*self._parts())

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """Yield the tables, for rich."""
        yield from self._parts()


def as_text(*parts: Any, width: int = 10_000) -> str:
    """Render as text. By default no line is broken: a file or a log has no width of its own."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> Any:
    """Make a table; the columns of `right` are aligned to the right. Brackets in texts are no markup."""
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


def facts_grid(rows: Iterable[tuple[str, str]]) -> Any:
    """Make a table of names and values, a line each."""
    from rich.table import Table
    from rich.text import Text

    made = Table.grid(padding=(0, 2))
    for name, text in rows:
        made.add_row(Text(name, style="bold"), Text(text))
    return made


def first_names(names: Sequence[str], between: str = ", ") -> str:
    """Join names, of which only the first are listed if they are many."""
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return between.join([*names[:_LISTED], *more])


def shape_text(sizes: Sequence[int]) -> str:
    """Write a shape as torch does."""
    return f"[{', '.join(map(str, sizes))}]"
