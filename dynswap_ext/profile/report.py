"""`Report`: what each group of weights costs, where time is lost, and what would help."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from dynswap_ext._swap.protocol import Session
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.name_patterns import key_of, label_of_groups
from dynswap_ext._util.tables import as_text, plain_table
from dynswap_ext._util.units import show_budget, show_ns
from dynswap_ext.profile.host_memory import HostMemory
from dynswap_ext.profile.recording import CAUSES, SAVED_TENSORS, GroupFigures, figures_of
from dynswap_ext.profile.shared_out import SharedOut
from dynswap_ext.profile.stats import Stats

#: Columns that have text. The others have numbers.
_WORDS: Final = ("weights", "from", "place", "because of")
#: Columns whose text is broken into several lines if it is long.
_FOLDED: Final = ("weights", "because of")
#: Columns that are only shown if a line has at least so many characters.
_WIDE: Final = {"groups": 100, "from": 150, "hits (late)": 150, "copying": 150, "misses": 110, "moved": 110}
#: A space at which no line is broken.
_NARROW: Final = "\u00a0"

_MIB: Final = 1 << 20
#: If the first use has more than this share of the stalls, it is named as the main cause.
_MOSTLY: Final = 0.9
#: By cause of a wait: the advice against it.
_ADVICE: Final = {
    "bus-bound": "keeping more weights on the device would help: {budget}",
    "late prefetch": "a deeper prefetch would help: prefetch={prefetch}",
    "not predicted": "the order of use differs from pass to pass (branches, experts); keeping more weights "
    "on the device would help: {budget}",
    "arena full": "a larger budget would help: {budget}",
    "slot held": "drop tensors{holder} that your code keeps in a list or a graph, or give a larger budget: "
    "{budget}",
    "master changed": "that is what training costs; if nothing trains, look for what writes to the masters",
}
#: Causes against which a `prefetch` of more than 0 would help.
_NOT_AHEAD: Final = frozenset(("bus-bound", "late prefetch", "not predicted", "arena full"))
#: Each group is missed once while the order of forward is learned, and once while that of backward is.
_LEARNED_AFTER: Final = 2
_LEARNING: Final = (
    "the order of use was still being learned (backward has one of its own), and that does not come again"
)
_PURE_PYTHON: Final = (
    "the pure-Python provider fetches nothing ahead, the native one does; keeping more weights on the device "
    "helps both: {budget}"
)


@dataclass(frozen=True)
class Report:
    """Figures of an install, taken at one moment; ``print`` shows them.

    They cover everything since the install, or since ``handle.reset_stats()``. Only the times of groups on an
    accelerator are those of the latest recording.
    """

    #: The figures of each group of weights, in the order of use.
    rows: tuple[GroupFigures, ...]
    #: Counters of all groups together, and the plan.
    stats: Stats
    #: The device on which the model computes.
    device: str
    #: Bytes that weights may take on the device; None: only what `prefetch` needs.
    budget: int | None
    #: The option `prefetch` of the install.
    prefetch: int
    #: Why pure Python, or torch's own streams, serve the install if that was not asked for; else empty.
    reason: str = ""
    #: Bytes of masters that are sampled: a small write to them that bumps no version may go unseen.
    sampled_bytes: int = 0
    #: Whether the budget is "auto", so that `budget` changes with what the measured calls leave.
    automatic: bool = False
    #: Bytes of the device that an automatic budget leaves to others; None if no `headroom` was given.
    headroom: int | None = None
    #: Why weights that stay on the device (residents) do not give way to all other memory, and what to do;
    #: empty if they do. None unless the budget is "auto" and the device is an accelerator.
    giving_way: str | None = None
    #: The host's RAM that the weights of all installed models take.
    host: HostMemory | None = None
    #: Bytes of the device for tensors that are saved for backward; None: all of them stay there.
    activations: int | None = None
    #: What the ranks of `mesh=` save each other; None if none was given, and in pure Python.
    shared_out: SharedOut | None = None

    @property
    def stall_ns(self) -> int:
        """How long the model waited for weights, in nanoseconds, summed over the threads that called it."""
        return sum(row.stall_ns for row in self.rows)

    @property
    def causes(self) -> dict[str, int]:
        """How long the model waited for weights, in nanoseconds, by cause, the longest first."""
        return dict(_summed(self.rows).most_common())

    @property
    def diagnosis(self) -> str:
        """A sentence with the main cause of the waits, and what would help."""
        rows, causes, whole = self.rows, self.causes, self.stall_ns
        if not rows:
            return "no weight has to be moved: every master is already where and what it should be"
        if not any(row.hits or row.misses or row.copies for row in rows):
            return "nothing has been used yet: run the model, then ask again"
        if not whole:
            return self._without_stall()
        for_saved = sum(row.stall_ns for row in rows if _is_of_saved(row))
        if for_saved > whole // 2 and self.activations is not None:
            return (
                f"{_share(for_saved, whole)} of {show_ns(whole)} of waiting was for tensors saved for "
                f"backward; a larger bound would help (activations, now {format_bytes(self.activations)})"
            )
        if all(row.resident for row in rows if not _is_of_saved(row)) and not causes.get("master changed"):
            return (
                f"every weight stays on the device now: the {show_ns(whole)} of waiting were for their "
                "copies so far, and a larger budget changes nothing"
            )
        first = causes.pop("first use", 0)
        if not causes:
            return (
                f"first use: all of {show_ns(whole)} of waiting was for {CAUSES['first use']}; it does not "
                "come again"
            )
        cause, stalled = next(iter(causes.items()))
        meaning, advice = f"for {CAUSES[cause]}", _ADVICE[cause]
        if cause == "not predicted" and self.stats.provider == "python":
            advice = _PURE_PYTHON
        elif not self.prefetch and cause in _NOT_AHEAD:
            advice = "with prefetch=0 nothing is fetched ahead of its use; prefetch=2 would help"
        elif cause == "not predicted" and all(
            row.misses <= _LEARNED_AFTER for row in rows if cause in row.causes
        ):
            advice = _LEARNING
        holder = min((row.held_by for row in rows if row.held_by), default="")
        advice = advice.format(
            budget=self._larger_budget(stalled),
            prefetch=max(2, 2 * self.prefetch),
            holder=holder and f" of {holder}",
        )
        if first > _MOSTLY * whole:
            return (
                f"first use: {_share(first, whole)} of {show_ns(whole)} of waiting was for "
                f"{CAUSES['first use']}; it does not come again. Of the rest, {show_ns(stalled)} was "
                f"{meaning} ({cause}): {advice}"
            )
        text = f"{cause}: {_share(stalled, whole)} of {show_ns(whole)} of waiting was {meaning}"
        if first:
            text += f" ({_share(first, whole)} was for the first use, which does not come again)"
        return f"{text}; {advice}"

    def _masters(self) -> str:
        """Return words for how many bytes of masters are copied in which way; empty if none are."""
        ways = {
            "page-locked": self.stats.pinned_bytes,
            "through a pinned buffer (not page-locked)": self.stats.staged_bytes,
            "from files": self.stats.mapped_bytes,
        }
        return ", ".join(f"{format_bytes(size)} {way}" for way, size in ways.items() if size)

    def _activations(self) -> str:
        """Return words for what steps save for backward, and for how much of it leaves the device."""
        stats = self.stats
        saves = f"a step saves {format_bytes(stats.saved_step_bytes)}"
        if not stats.offloaded_bytes:
            return f"{saves}, and all of it stays on the device"
        return (
            f"{saves}; at most {format_bytes(stats.saved_bytes)} had not left at one time; "
            f"{format_bytes(stats.offloaded_bytes)} were copied to the host in all, and "
            f"{format_bytes(stats.restored_bytes)} back"
        )

    def _without_stall(self) -> str:
        waited_for = sum(row.misses + row.late_hits for row in self.rows)
        if not waited_for or not any(row.copies and row.copy_ns is None for row in self.rows):
            if waited_for:
                return "no time to speak of was lost"
            return "no time was lost: all weights were there when they were needed"
        uses = sum(row.hits + row.misses for row in self.rows)
        return (
            f"{waited_for} of {uses} uses waited for a copy; how long is timed on this device only while it "
            "is recorded: run the model in `with handle.record():`, then ask again"
        )

    def _larger_budget(self, stalled: int) -> str:
        """Return, as the text of the option, the budget with which the bus would have kept up.

        If copies take the time b, of which the model waits for s, the bus keeps up with the share (b - s) / b
        of the streamed bytes. The share s / b of them has to stay on the device. If compute is not paced
        evenly, this is a little too little.
        """
        streamed = sum(row.bytes for row in self.rows if not row.resident and not _is_of_saved(row))
        copying = sum((row.copy_ns or 0) - row.causes.get("first use", 0) for row in self.rows)
        share = min(1.0, stalled / copying) if copying > 0 else 1.0
        used = self.stats.resident_bytes + self.stats.arena_bytes
        # No more than all weights: if all stay on the device, there is no arena.
        wanted = min(self.stats.weight_bytes, max(used, self.budget or 0) + int(streamed * share))
        now = f" (now {format_bytes(self.budget)})" if self.budget is not None else ""
        if wanted >= 1 << 30:
            return f'budget="{-(-wanted * 100 >> 30) / 100:g}GiB"{now}'
        unit, name = (_MIB, "MiB") if wanted > 16 * _MIB else (1 << 10, "KiB")
        return f'budget="{max(1, -(-wanted // unit))}{name}"{now}'

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, and the texts, in types that JSON has."""
        content = asdict(self)
        groups = content.pop("rows")
        derived = {"stall_ns": self.stall_ns, "causes": self.causes, "diagnosis": self.diagnosis}
        return {**content, **derived, "groups": groups}

    def text(self, *, collapse: bool = True, width: int | None = None) -> str:
        """Return the diagnosis and the table, as `print` shows them.

        Parameters
        ----------
        collapse
            Whether the groups of repeated layers share one row. If not, each group has a row.
        width
            The number of characters in a line. Default: the width of the terminal.
        """
        from rich.text import Text

        # If there is no terminal, the lines are wide enough for all columns.
        columns = shutil.get_terminal_size((160, 25)).columns if width is None else width
        notes = []
        if self.reason:
            slower = "pure Python, which fetches nothing ahead"
            if self.stats.provider == "native":
                slower = "copies go through torch's own streams"
            notes.append(f"{slower}: {self.reason}")
        if masters := self._masters():
            notes.append(f"masters: {masters}")
        moved, decoded = self.stats.bytes_moved, self.stats.bytes_decoded
        if moved != decoded:
            stand = f"{format_bytes(moved)} moved stand for {format_bytes(decoded)}"
            notes.append(f"coded: {stand}, {decoded / moved:.2f} x")
        if self.stats.saved_bytes:
            notes.append(f"activations: {self._activations()}")
        if self.host is not None and self.host.weights:
            notes.append(f"host RAM: {self.host}")
        if self.shared_out is not None:
            notes.append(f"mesh: {self.shared_out}")
        if self.giving_way is not None:
            lost = f"{self.stats.given_way} have, of {format_bytes(self.stats.given_way_bytes)}"
            told = self.giving_way or f"give way to whatever runs out of memory (so far {lost})"
            notes.append(f"residents {told}")
        if self.sampled_bytes:
            sees = "The native provider can see every write"
            if self.stats.provider == "native":
                sees = (
                    "Linux 6.7 and later reports every write, where userfaultfd is allowed and the memory is "
                    "not shared"
                )
            notes.append(
                f"{format_bytes(self.sampled_bytes)} of masters are sampled: a small write that bumps no "
                f"version (`p.data[i] = x`, NumPy) may go unseen. {sees}"
            )
        budget = f"budget {show_budget(self.budget, automatic=self.automatic)}"
        if self.automatic and self.headroom is not None:
            budget += f", headroom {format_bytes(self.headroom)}"
        if self.activations is not None:
            budget += f", activations {format_bytes(self.activations)}"
        provider = f"{self.stats.provider}/{self.stats.backend} on {self.device}"
        title = f"{provider}, {budget}, prefetch {self.prefetch}"
        table = self.table(collapse=collapse, width=columns)
        lines = (*notes, "", *self._legend(columns))
        return as_text(Text(self.diagnosis), Text(title), table, *map(Text, lines), width=columns)

    def _legend(self, width: int) -> Iterator[str]:
        """Yield sentences that explain the columns and causes that are shown."""
        yield "A group of weights travels in one copy: streamed for each use, or staying (resident)."
        if width >= _WIDE["misses"]:
            yield "A hit was on the device or on its way when needed. The copy of a miss began only then."
        if experts := [row for row in self.rows if row.by_use]:
            yield (
                f"Experts stay on the device by use: {_found(experts)} of the uses of these "
                f"{len(experts):,} groups found them there."
            )
        for cause in self.causes:
            yield f"{cause}: a wait for {CAUSES[cause]}."

    def table(self, *, collapse: bool = True, width: int = 150) -> Any:
        """Return the table, for rich. It has fewer columns if `width` is less than 150 characters."""
        rows = [_cells(label, rows) for label, rows in _lines(self.rows, collapse)]
        rows.append({**_cells("all", self.rows), "from": ""})
        columns = [column for column in rows[0] if width >= _WIDE.get(column, 0)]
        return plain_table(
            columns,
            [[cells[column] for column in columns] for cells in rows],
            right=set(columns).difference(_WORDS),
            folded=_FOLDED,
            bold=(len(rows) - 1,),
        )

    def __str__(self) -> str:
        return self.text()


def rows_of(session: Session) -> tuple[GroupFigures, ...]:
    """Return the rows of a session's report. Tensors saved for backward have one once they have come back."""
    return tuple(row for row in figures_of(session) if row.hits or row.misses or not _is_of_saved(row))


def _is_of_saved(row: GroupFigures) -> bool:
    return row.names == (SAVED_TENSORS,)


def _cells(label: str, rows: Sequence[GroupFigures]) -> dict[str, str]:
    """Return the cells of a line that shows some groups together, by column."""

    def total(name: str) -> int:
        return sum(getattr(row, name) or 0 for row in rows)

    resident, late, moved, stalled = map(total, ("resident", "late_hits", "bytes_moved", "stall_ns"))
    place = f"{resident} resident"
    if resident in (0, len(rows)):
        place = "resident" if resident else "streamed"
    if rows and all(row.by_use for row in rows):
        place = f"by{_NARROW}use, {_found(rows)}"
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
        "copying": show_ns(total("copy_ns")) if any(row.copy_ns is not None for row in rows) else "?",
        "stalled": show_ns(stalled) if stalled or not untimed else "?",
        "because of": _because(rows),
    }


def _found(experts: Sequence[GroupFigures]) -> str:
    """Return the share of the uses of experts that needed no copy, as text.

    A use reads each weight of its group once.
    """
    uses = sum((row.hits + row.misses) / len(row.names) for row in experts)
    copies = sum(row.copies for row in experts)
    return f"{max(0.0, 1 - copies / uses):.0%}" if uses else "none"


def _because(rows: Sequence[GroupFigures]) -> str:
    """Return the main cause of the waits with its share, and a second one if it has 5 % or more."""
    causes = _summed(rows)
    held = next((f" by {row.held_by}" for row in rows if row.held_by), "")
    listed: list[str] = []
    for cause, ns in sorted(causes.items(), key=lambda item: (-item[1], list(CAUSES).index(item[0])))[:2]:
        share = round(100 * ns / causes.total())
        if share >= 5 or not listed:
            by = held if cause == "slot held" else ""
            listed.append(
                f"{cause.replace(' ', _NARROW)}{by}" + (f" {share}{_NARROW}%" if share < 100 else "")
            )
    return ", ".join(listed)


def _summed(rows: Iterable[GroupFigures]) -> Counter[str]:
    """Return the nanoseconds of waits by cause."""
    summed: Counter[str] = Counter()
    for row in rows:
        summed.update(row.causes)
    return summed


def _lines(rows: Sequence[GroupFigures], collapse: bool) -> Iterator[tuple[str, list[GroupFigures]]]:
    """Yield a label for each line of the table, and the groups that share the line."""
    alike: dict[object, list[GroupFigures]] = {}
    for index, row in enumerate(rows):
        layer = tuple(map(key_of, row.names)), row.by_use or (row.bytes, row.source, row.resident)
        alike.setdefault(layer if collapse else index, []).append(row)
    for same in alike.values():
        yield label_of_groups([row.names for row in same]), same


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "less than 1 %"
