"""Tables that are printed in colour by rich on a terminal, and as plain text elsewhere."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynswap_ext._util.name_patterns import wrapped

#: Characters in a line where no terminal limits them.
_UNBROKEN: Final = 10_000
#: A text that is never shortened: a number, with a unit or a sign, or a shape.
_FIGURE: Final = re.compile(r"-?[\d.,]+ ?[A-Za-z%]*|\[[\d, ]*\]|\d+( x \d+)*")
#: The least width of a column of text, however narrow the terminal is.
_NARROWEST: Final = 12
#: The fewest characters of a word that are worth showing.
_WORTH_A_PART: Final = 8
_WORDS: Final = re.compile(r"(?:\{[^}]*\}|[^./: ])+[./: ]*|[./: ]+")
#: Characters between two columns.
_BETWEEN: Final = 3


class Printable:
    """Base class of data that ``print`` shows as plain tables, and rich in colour."""

    def _parts(self) -> tuple[Any, ...]:
        """Return the tables and texts to print, as objects of rich."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(*self._parts())

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """Yield the tables, for rich."""
        yield from self._parts()


def as_text(*parts: Any, width: int = _UNBROKEN) -> str:
    """Return objects of rich as plain text. By default no line is broken, as for a file or a log."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def write(*parts: Any) -> None:
    """Print objects of rich on stdout.

    On a terminal, lines fit its width. A file or a pipe gets plain text, whose lines are broken only if the
    environment variable COLUMNS has a width.
    """
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        return print(as_text(*parts, width=console.width if "COLUMNS" in os.environ else _UNBROKEN))
    for part in parts:
        console.print(part)


def plain_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
    optional: Sequence[str] = (),
    folded: Container[str] = (),
    bold: Container[int] = (),
) -> Any:
    """Return a table that fits into the width where it is printed, one line for each row.

    Long texts are shortened in the middle or folded; figures never are. Brackets in texts are no markup.

    Parameters
    ----------
    columns, rows
        The headings, and the rows, with one cell for each heading.
    right
        Columns that are aligned to the right.
    optional
        Columns that are left out, in this order, until there is room for the rest.
    folded
        Columns whose long texts go on in further lines of the row.
    bold
        The numbers of the rows in bold.
    """
    return _Table(tuple(columns), tuple(map(tuple, rows)), frozenset(right), tuple(optional), folded, bold)


@dataclass(frozen=True)
class _Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str]
    optional: tuple[str, ...]
    folded: Container[str]
    bold: Container[int]

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        widths, between = self._widths(options.max_width)
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, between - 2))
        for name in widths:
            made.add_column(Text(name), justify="right" if name in self.right else "left", no_wrap=True)
        for number, row in enumerate(self.rows):
            cells = dict(zip(self.columns, row, strict=True))
            texts = (
                (wrapped if name in self.folded else shortened)(cells[name], width)
                for name, width in widths.items()
            )
            made.add_row(*map(Text, texts), style="bold" if number in self.bold else "")
        yield made

    def _widths(self, room: int) -> tuple[dict[str, int], int]:
        """Return the width of each column that is shown, and the number of characters between two of them."""
        cells = {name: [row[place] for row in self.rows] for place, name in enumerate(self.columns)}
        heads = {name: max(map(len, name.split("\n"))) for name in self.columns}
        widths = {name: max([heads[name], *map(len, cells[name])]) for name in self.columns}
        if sum(widths.values()) + _BETWEEN * len(widths) <= room:
            return widths, _BETWEEN
        least = {}
        for name, texts in cells.items():
            figures = (len(text) for text in texts if _FIGURE.fullmatch(text))
            least[name] = max(heads[name], min(widths[name], _NARROWEST), *figures, 0)
        narrow = _BETWEEN - 1
        for name in self.optional:
            if sum(least.values()) + narrow * len(least) <= room:
                break
            del least[name]
        widths = {name: widths[name] for name in least}
        spare = room - sum(least.values()) - narrow * len(least)
        # The columns that lack little come first, so that they are not shortened for the wide ones.
        for left, name in enumerate(sorted(least, key=lambda name: widths[name] - least[name])):
            more = min(widths[name] - least[name], max(0, spare) // (len(least) - left))
            widths[name] = least[name] + more
            spare -= more
        return widths, narrow


def facts_grid(rows: Iterable[tuple[str, str]]) -> Any:
    """Return a table of names and values. Long values are broken at spaces into several lines."""
    return _Facts(tuple(rows))


@dataclass(frozen=True)
class _Facts:
    rows: tuple[tuple[str, str], ...]

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        from rich.table import Table
        from rich.text import Text

        made = Table.grid(padding=(0, 2))
        room = options.max_width - 2 - max((len(name) for name, _ in self.rows), default=0)
        for name, text in self.rows:
            lines = (
                " ".join(shortened(word, max(room, _NARROWEST)) for word in line.split(" "))
                for line in text.split("\n")
            )
            made.add_row(Text(name, style="bold", no_wrap=True), Text("\n".join(lines)))
        yield made


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters. In a longer one, words in the middle are left out."""
    if len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip())][: max(0, width - _NARROWEST)]
    text, room = text.strip(), width - len(indent) - 1
    if len(text) <= room + 1:
        return indent + text
    words = _WORDS.findall(text)
    head = tail = ""
    while True:  # the end says more than the beginning, and gets the first word
        if len(tail) <= len(head) and len(head) + len(words[-1]) + len(tail) <= room:
            tail = words.pop() + tail
        elif len(head) + len(words[0]) + len(tail) <= room:
            head += words.pop(0)
        elif len(head) + len(words[-1]) + len(tail) <= room:
            tail = words.pop() + tail
        else:
            break
    spare = room - len(head) - len(tail)
    if head and spare >= _WORTH_A_PART:
        tail = words[-1][-spare:] + tail
    if not head or not tail:
        head, tail = text[: room // 2], text[len(text) - (room - room // 2) :]
    return f"{indent}{head}…{tail}"


def shape_text(sizes: Sequence[int]) -> str:
    """Return a shape as torch writes it: "[2, 3]"."""
    return f"[{', '.join(map(str, sizes))}]"
