"""What each group of weights costs, and where the time is lost."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.name_patterns import key_of, label_of, pattern_of
from dynswap_ext._util.tables import as_text
from dynswap_ext._util.units import show_ns
from dynswap_ext.profile.diagnosis import diagnose
from dynswap_ext.profile.recording import CAUSES, GroupFigures
from dynswap_ext.profile.stats import Stats

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report"]

#: Columns of text; the others have numbers.
_WORDS: Final = ("weights", "from", "place", "because of")
_FOLDED: Final = ("weights", "because of")
#: Columns that are only shown in lines of at least so many characters.
_WIDE: Final = {"groups": 100, "from": 150, "hits (late)": 150, "copying": 150, "misses": 110, "moved": 110}
#: A space at which no line is broken.
_NARROW: Final = "\u00a0"


@dataclass(frozen=True)
class Report:
    """Figures of an install, taken at one moment; ``print`` shows them.

    They cover everything since the install, or since ``handle.reset_stats()``.
    """

    #: One per group, in the order of use.
    rows: tuple[GroupFigures, ...]
    #: The sums, and the plan.
    stats: Stats
    device: str
    #: Bytes for streamed and resident weights together; None: only what `prefetch` needs.
    budget: int | None
    #: As given to the install.
    prefetch: int
    #: Why pure Python was chosen, if ``provider="auto"`` chose it; else empty.
    reason: str = ""
    #: Bytes of masters that are sampled: a small write to them that bumps no version may go unseen.
    sampled_bytes: int = 0

    @property
    def stall_ns(self) -> int:
        """How long consumers waited, in nanoseconds, summed over all of them."""
        return sum(row.stall_ns for row in self.rows)

    @property
    def causes(self) -> dict[str, int]:
        """The same by cause, the largest first."""
        return dict(_summed(self.rows).most_common())

    @property
    def diagnosis(self) -> str:
        """Where the time goes and what would help, in words."""
        return diagnose(self.rows, self.stats, self.causes, self.budget, self.prefetch)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, in types that JSON has."""
        content = asdict(self)
        groups = content.pop("rows")
        derived = {"stall_ns": self.stall_ns, "causes": self.causes, "diagnosis": self.diagnosis}
        return {**content, **derived, "groups": groups}

    def text(self, *, collapse: bool = True, width: int | None = None) -> str:
        """Return the table and the diagnosis, as `print` shows them.

        Parameters
        ----------
        collapse
            False gives each group a row of its own; otherwise the groups of repeated layers share one.
        width
            Characters in a line. Default: the width of the terminal.
        """
        from rich.text import Text

        # Without a terminal, wide enough for all columns.
        columns = shutil.get_terminal_size((160, 25)).columns if width is None else width
        notes = []
        if self.reason:
            notes.append(f"pure Python, which fetches nothing ahead: {self.reason}")
        if self.sampled_bytes:
            notes.append(
                f"{format_bytes(self.sampled_bytes)} of masters are sampled: a small write that bumps no "
                "version (`p.data[i] = x`, NumPy) may go unseen. Linux 6.7 and later reports every "
                "write, where userfaultfd is allowed and the memory is not shared"
            )
        table = self.table(collapse=collapse, width=columns)
        return as_text(table, *map(Text, (*notes, self.diagnosis)), width=columns)

    def table(self, *, collapse: bool = True, width: int = 150) -> Table:
        """Return the table, for rich. It has fewer columns if lines have less than 150 characters."""
        from rich.table import Table
        from rich.text import Text

        kept = f"budget {format_bytes(self.budget)}" if self.budget is not None else "no budget"
        table = Table(
            title=f"{self.stats.provider}/{self.stats.backend} on {self.device}, {kept}, "
            f"prefetch {self.prefetch}",
            show_footer=True,
        )
        footer = {**_cells("all", self.rows), "from": ""}
        shown = [column for column in footer if width >= _WIDE.get(column, 0)]
        for name in shown:
            justify: Any = "left" if name in _WORDS else "right"
            folded = name in _FOLDED
            least = None if not folded else 20 if width >= 110 else 12
            table.add_column(
                name,
                Text(footer[name]),
                justify=justify,
                overflow="fold",
                min_width=least,
                no_wrap=not folded,
            )
        for label, rows in _lines(self.rows, collapse):
            cells = _cells(label, rows)
            table.add_row(*(Text(cells[name]) for name in shown))
        return table

    def __str__(self) -> str:
        return self.text()


def _cells(label: str, rows: Sequence[GroupFigures]) -> dict[str, str]:
    """Return the cells of one line for some groups, by column."""

    def total(name: str) -> int:
        return sum(getattr(row, name) or 0 for row in rows)

    resident, late, moved, stalled = map(total, ("resident", "late_hits", "bytes_moved", "stall_ns"))
    place = f"{resident} resident"
    if resident in (0, len(rows)):
        place = "resident" if resident else "streamed"
    timed = [row.copy_ns is not None for row in rows]
    untimed = any(row.copies and row.copy_ns is None for row in rows)
    return {
        "weights": label,
        "groups": str(len(rows)),
        "bytes": format_bytes(total("bytes")),
        "from": rows[0].source if rows else "",
        "place": place,
        "hits (late)": str(total("hits")) + (f" ({late})" if late else ""),
        "misses": str(total("misses")),
        "moved": format_bytes(moved) if moved else "-",
        "copying": show_ns(total("copy_ns")) if any(timed) else "?",
        "stalled": show_ns(stalled) if stalled or not untimed else "?",
        "because of": _because(rows),
    }


def _because(rows: Sequence[GroupFigures]) -> str:
    """Return the main causes of a stall, with their shares of it."""
    causes = _summed(rows)
    whole = sum(causes.values())
    held = next((row.held_by for row in rows if row.held_by), "")
    listed: list[str] = []
    for cause, ns in sorted(causes.items(), key=lambda item: (-item[1], CAUSES.index(item[0]))):
        share = round(100 * ns / whole)
        if listed and (share < 5 or len(listed) == 2):
            continue
        by = f" by {held}" if cause == "slot held" and held else ""
        listed.append(f"{cause}{by}" + (f" {share}{_NARROW}%" if share < 100 else ""))
    return ", ".join(listed)


def _summed(rows: Iterable[GroupFigures]) -> Counter[str]:
    """Return nanoseconds of stall by cause."""
    summed: Counter[str] = Counter()
    for row in rows:
        summed.update(row.causes)
    return summed


def _lines(rows: Sequence[GroupFigures], collapse: bool) -> Iterator[tuple[str, list[GroupFigures]]]:
    """Yield labels and the groups that share a line."""
    alike: dict[object, list[GroupFigures]] = {}
    for index, row in enumerate(rows):
        key: object = index
        if collapse:
            key = tuple(map(key_of, row.names)), row.bytes, row.source, row.resident
        alike.setdefault(key, []).append(row)
    for same in alike.values():
        together = zip(*(row.names for row in same), strict=True)
        yield label_of([pattern_of(names, most=3) for names in together], most=2), same
