"""Shows rows as tables in a terminal, and summarises them for a record."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dynswap_ext._util.memory import format_bytes
from head_to_head.baselines import BASELINES, OURS, PEER, PRIMARY, RESIDENT
from head_to_head.job import FILE, RAM, Row

_WIDE = 190
_HARDLY = 0.01  # of the weights, read in a call
_KEPT = "read nothing: its weights stayed in RAM, and it is not compared"
BIT_EQUAL = "bit-equal"


@dataclass
class Section:
    """One workload with its weights in one place: the rows of all baselines."""

    workload: str
    title: str
    placement: str
    device: str
    unit: str
    weight_bytes: int
    bandwidth: float | None  #: bytes per second of the disk or bus; None if nothing moves
    bandwidth_kind: str
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def ours(self) -> str:
        """Return our baseline that peers are compared with; "" if none ran."""
        return next((name for name in PRIMARY if self.median(name) is not None), "")

    def median(self, name: str) -> float | None:
        """Return the median seconds of a call of a baseline; None if it did not run."""
        row = self.rows.get(name)
        return statistics.median(row.seconds) if row and row.seconds else None

    def moved(self, name: str) -> float | None:
        """Return a call's bytes: those that the disk delivered, or else those that were counted."""
        row = self.rows[name]
        return row.moved_bytes if row.disk_bytes is None else row.disk_bytes

    def limit(self, name: str) -> float | None:
        """Return max(compute, bytes that the baseline moves / bandwidth), in seconds."""
        compute = self.median(RESIDENT)
        moved = self.moved(name)
        if compute is None:
            return None
        return max(compute, moved / self.bandwidth) if moved and self.bandwidth else compute

    def ratio(self, name: str, to: float | None) -> float | None:
        """Return a baseline's median time divided by `to`; None if one of them is missing."""
        mine = self.median(name)
        return mine / to if mine is not None and to else None

    def stays(self, name: str) -> bool:
        """Return whether a peer should have streamed from the file, but has kept the weights in RAM."""
        read = self.rows[name].disk_bytes
        streams = self.placement == FILE and BASELINES[name].kind == PEER
        return streams and read is not None and read < _HARDLY * self.weight_bytes

    def equal(self, name: str) -> bool:
        """Return whether a baseline's outputs are the resident model's, to the bit.

        A kernel may sum in another order with other addresses. Then the resident model's own outputs differ
        between processes, and it is enough if a baseline's are equal in some of them.
        """
        outputs, resident = self.rows[name].outputs, self.rows[RESIDENT].outputs
        return outputs == BIT_EQUAL or (BIT_EQUAL in outputs and resident not in ("", BIT_EQUAL))

    def best_peer(self) -> str:
        """Return the fastest peer that streams and has the resident model's outputs; "" if none ran."""
        ran = [
            name
            for name, row in self.rows.items()
            if BASELINES[name].kind == PEER and row.seconds and self.equal(name) and not self.stays(name)
        ]
        return min(ran, key=lambda name: statistics.median(self.rows[name].seconds), default="")

    def tied(self, name: str) -> bool:
        """Return whether the middle halves of a baseline's times and of ours overlap."""
        here, there = (_middle(self.rows[each].seconds) for each in (name, self.ours))
        return here[0] <= there[1] and there[0] <= here[1]

    def noise(self) -> float:
        """Return how much the same work differs between processes: the slowest median over the fastest.

        With the weights in RAM and nothing to move, ours at any prefetch does the same as the resident
        model.
        """
        if self.placement != RAM or self.device != "cpu":
            return 1.0
        alike = [self.median(name) for name in (RESIDENT, "ours", "ours, prefetch 0")]
        medians = [median for median in alike if median]
        return max(medians) / min(medians) if medians else 1.0

    def to_record(self) -> dict[str, Any]:
        """Return the section as the record keeps it."""
        ours = self.median(self.ours) if self.ours else None
        rows = {name: self._summary(name, row, ours) for name, row in self.rows.items()}
        facts = {name: value for name, value in vars(self).items() if name != "rows"}
        best = {"noise": self.noise(), "ours": self.ours, "best_peer": self.best_peer()}
        return {**facts, **best, "rows": rows}

    def _summary(self, name: str, row: Row, ours: float | None) -> dict[str, Any]:
        if not row.seconds:
            return {"failure": row.failure}
        return {
            "kind": BASELINES[name].kind,
            "seconds": row.seconds,
            "ratio_to_ours": self.ratio(name, ours),
            "ratio_to_limit": self.ratio(name, self.limit(name)),
            "ready_seconds": row.ready_seconds,
            "first_seconds": row.first_seconds,
            "peak_bytes": row.peak_bytes,
            "loading_peak_bytes": row.loading_peak_bytes,
            "moved_bytes": self.moved(name),
            "outputs": row.outputs,
            "equal": self.equal(name),
            "stays_in_ram": self.stays(name),
            **({"note": row.note} if row.note else {}),
        }


def _middle(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def where(placement: str, device: str) -> str:
    """Return in words where the weights are, and what that measures."""
    if placement == RAM:
        if torch.device(device).type == "cpu":
            return "weights in RAM, where they compute: nothing has to move, access is what costs"
        return "weights in RAM, computing on the device: what does not stay there crosses the bus"
    return (
        "weights in a file, none of which is in the page cache when a call begins: "
        "all but the resident model stream from the disk"
    )


def show(section: Section, console: Console) -> None:
    """Print a section's table."""
    rate = f"; {section.bandwidth_kind}: {format_bytes(section.bandwidth)}/s" if section.bandwidth else ""
    table = Table(
        title=f"{section.workload}: {section.title}; {format_bytes(section.weight_bytes)} of weights{rate}\n"
        + where(section.placement, section.device),
        title_justify="left",
    )
    table.add_column("baseline", no_wrap=True)
    for heading in (
        f"a {section.unit}",
        "fastest..slowest",
        "/ ours",
        "/ limit",
        "ready in",
        "peak",
        "moved",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outputs", no_wrap=True)
    table.add_column("what it has to do, or why it does not run")
    ours = section.median(section.ours) if section.ours else None
    device = torch.device(section.device)
    for name, row in section.rows.items():
        style = {OURS: "bold", PEER: ""}.get(BASELINES[name].kind, "dim")
        if not row.seconds:
            table.add_row(name, *["-"] * 8, f"[yellow]does not run: {_plain(row.failure)}", style=style)
            continue
        task = _KEPT if section.stays(name) else BASELINES[name].task(section.placement, device)
        table.add_row(
            name,
            show_seconds(section.median(name)),
            f"{show_seconds(min(row.seconds))}..{show_seconds(max(row.seconds))}",
            _ratio(section.ratio(name, ours)),
            _ratio(section.ratio(name, section.limit(name))),
            show_seconds(row.ready_seconds + row.first_seconds),
            format_bytes(row.peak_bytes),
            format_bytes(section.moved(name)),
            row.outputs if row.outputs == BIT_EQUAL else f"[red]{row.outputs}",
            task + (f" ({_plain(row.note)})" if row.note else ""),
            style=style,
        )
    console.print(table)


def explain(console: Console) -> None:
    """Print what the columns mean."""
    console.print(
        "Medians of calls after warm-up, each baseline in a process of its own. / ours: time in terms of "
        f"the first of these that ran: {'; '.join(PRIMARY)}. / limit: in terms of max(time of the resident "
        "model, bytes moved / bandwidth measured in this run). ready in: from the checkpoint to the first "
        "output. peak: of the timed calls, resident set above the start of the process, or allocated on the "
        "device. moved: what the disk delivered a call, as the system tells; over the bus, ours by its own "
        "count, others by the copies that torch was asked for."
    )


def console() -> Console:
    """Return a terminal, or a wide page if there is none."""
    made = Console()
    return made if made.is_terminal else Console(width=_WIDE)


def show_seconds(seconds: float | None) -> str:
    """Return seconds with three digits, in s, ms or us; a dash for None."""
    if seconds is None:
        return "-"
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if seconds * s >= 1), ("us", 1e6))
    value = seconds * scale
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
