"""What each group of weights costs, and what the time is lost to."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from dynswap_ext._memory import format_bytes
from dynswap_ext._patterns import key_of, label_of, pattern_of
from dynswap_ext._recording import CAUSES, GroupFigures
from dynswap_ext._stats import Stats
from dynswap_ext.inspect.verdict import show_ns, verdict_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Report"]

#: Each with what a line has for it.
_COLUMNS: Final = {
    "weights": "label",
    "groups": "groups",
    "bytes": "size",
    "from": "source",
    "place": "place",
    "hits (late)": "hits",
    "misses": "misses",
    "moved": "moved",
    "copying": "copying",
    "stalled": "stalled",
    "because of": "because",
}
_WORDS: Final = ("weights", "from", "place", "because of")
#: Shown in lines of so many characters only.
_WIDE: Final = {"groups": 100, "from": 150, "hits (late)": 150, "copying": 150, "misses": 110, "moved": 110}
#: A space that no line is broken at.
_NARROW: Final = "\u00a0"


@dataclass(frozen=True)
class Report:
    """Figures of an install, taken at one moment. ``print`` it.

    Of everything since the install, or since ``handle.reset_stats()``.
    """

    #: One per group, in the order of use.
    rows: tuple[GroupFigures, ...]
    #: The sums, and the plan.
    stats: Stats
    device: str
    #: Bytes for streamed and resident weights together; None: just what `prefetch` needs.
    budget: int | None
    #: As given to the install.
    prefetch: int
    #: Why the install got pure Python, where it was given the choice; else empty.
    reason: str = ""
    #: Bytes of masters that are sampled: a small write to them that bumps no version may go unseen.
    sampled_bytes: int = 0

    @property
    def stall_ns(self) -> int:
        """How long consumers waited, in nanoseconds, summed over them."""
        return sum(row.stall_ns for row in self.rows)

    @property
    def causes(self) -> dict[str, int]:
        """The same by cause, the largest first."""
        summed: Counter[str] = Counter()
        for row in self.rows:
            summed.update(row.causes)
        return dict(summed.most_common())

    @property
    def verdict(self) -> str:
        """Where the time goes and what would help, in words."""
        return verdict_of(self.rows, self.stats, self.causes, self.budget, self.prefetch)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in what JSON knows."""
        return {
            "device": self.device,
            "reason": self.reason,
            "sampled_bytes": self.sampled_bytes,
            "budget": self.budget,
            "prefetch": self.prefetch,
            "stall_ns": self.stall_ns,
            "causes": self.causes,
            "verdict": self.verdict,
            "stats": asdict(self.stats),
            "groups": [row.as_dict() for row in self.rows],
        }

    def text(self, *, collapse: bool = True, width: int | None = None) -> str:
        """The table and the verdict, as `print` shows them.

        Parameters
        ----------
        collapse
            False gives each group a row; else those of repeated layers share one.
        width
            Characters in a line. Default: the terminal's.
        """
        from rich.console import Console
        from rich.text import Text

        # Wide enough for the columns where nobody looks at it on a terminal.
        columns = shutil.get_terminal_size((160, 25)).columns if width is None else width
        console = Console(file=io.StringIO(), width=columns, color_system=None)
        console.print(self.table(collapse=collapse, width=columns))
        if self.reason:
            console.print(Text(f"pure Python, without prefetch: {self.reason}"))
        if self.sampled_bytes:
            console.print(
                Text(
                    f"{format_bytes(self.sampled_bytes)} of masters are sampled: a small write that bumps no "
                    "version (`p.data[i] = x`, NumPy) may go unseen. Linux 6.7 and later tells of every "
                    "write, where userfaultfd is allowed and the memory is not shared"
                )
            )
        console.print(Text(self.verdict))
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    def table(self, *, collapse: bool = True, width: int = 150) -> Table:
        """The table, for rich; with fewer columns where lines have less than 150 characters."""
        from rich.table import Table
        from rich.text import Text

        kept = f"budget {format_bytes(self.budget)}" if self.budget is not None else "no budget"
        table = Table(
            title=f"{self.stats.provider}/{self.stats.backend} on {self.device}, {kept}, "
            f"prefetch {self.prefetch}",
            show_footer=True,
        )
        total = _Line("all", self.rows)
        shown = [column for column in _COLUMNS if width >= _WIDE.get(column, 0)]
        for name in shown:
            text = "" if name == "from" else getattr(total, _COLUMNS[name])
            justify: Any = "left" if name in _WORDS else "right"
            folded = name in ("weights", "because of")
            least = None if not folded else 20 if width >= 110 else 12
            table.add_column(
                name, Text(text), justify=justify, overflow="fold", min_width=least, no_wrap=not folded
            )
        for line in _lines(self.rows, collapse):
            table.add_row(*(Text(getattr(line, _COLUMNS[name])) for name in shown))
        return table

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class _Line:
    """What the table says of some groups."""

    label: str
    rows: Sequence[GroupFigures]

    @property
    def groups(self) -> str:
        return str(len(self.rows))

    @property
    def source(self) -> str:
        return self.rows[0].source if self.rows else ""

    @property
    def place(self) -> str:
        resident = sum(row.resident for row in self.rows)
        if resident in (0, len(self.rows)):
            return "resident" if resident else "streamed"
        return f"{resident} resident"

    @property
    def size(self) -> str:
        return format_bytes(sum(row.bytes for row in self.rows))

    @property
    def hits(self) -> str:
        late = sum(row.late_hits for row in self.rows)
        return str(sum(row.hits for row in self.rows)) + (f" ({late})" if late else "")

    @property
    def misses(self) -> str:
        return str(sum(row.misses for row in self.rows))

    @property
    def moved(self) -> str:
        moved = sum(row.bytes_moved for row in self.rows)
        return format_bytes(moved) if moved else "-"

    @property
    def copying(self) -> str:
        known = [row.copy_ns for row in self.rows if row.copy_ns is not None]
        return show_ns(sum(known)) if known else "?"

    @property
    def stalled(self) -> str:
        stalled = sum(row.stall_ns for row in self.rows)
        untimed = any(row.copies and row.copy_ns is None for row in self.rows)
        return show_ns(stalled) if stalled or not untimed else "?"

    @property
    def because(self) -> str:
        summed: Counter[str] = Counter()
        for row in self.rows:
            summed.update(row.causes)
        whole = sum(summed.values())
        if not whole:
            return ""
        held = next((row.held_by for row in self.rows if row.held_by), "")
        told: list[str] = []
        for cause, ns in sorted(summed.items(), key=lambda item: (-item[1], CAUSES.index(item[0]))):
            share = round(100 * ns / whole)
            if told and (share < 5 or len(told) == 2):
                continue
            by = f" by {held}" if cause == "slot held" and held else ""
            told.append(f"{cause}{by}" + (f" {share}{_NARROW}%" if share < 100 else ""))
        return ", ".join(told)


def _lines(rows: Sequence[GroupFigures], collapse: bool) -> list[_Line]:
    alike: dict[object, list[GroupFigures]] = {}
    for index, row in enumerate(rows):
        key: object = index
        if collapse:
            key = tuple(map(key_of, row.names)), row.bytes, row.source, row.resident
        alike.setdefault(key, []).append(row)
    return [_Line(_label(same), same) for same in alike.values()]


def _label(rows: Sequence[GroupFigures]) -> str:
    together = zip(*(row.names for row in rows), strict=True)
    return label_of([pattern_of(names, most=3) for names in together], most=2)
