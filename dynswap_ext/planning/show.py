"""A plan as a table, in words, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.tables import facts_grid
from dynswap_ext._util.units import show_bytes, show_seconds
from dynswap_ext.planning.predict import Plan, Prediction

__all__ = ["as_json", "conclusions", "show"]

_TITLES = (
    *("budget", "of all", "resi-\ndent", "moved", "time", "limit"),
    *("x\nlimit", "stalls", "x all\nresident", "misses"),
)


def show(plan: Plan, facts: Mapping[str, str], notes: Sequence[str], console: Console) -> None:
    """Print the facts, the table, and what follows from it."""
    console.print(facts_grid(facts.items()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for prediction in plan.predictions:
        table.add_row(
            format_bytes(prediction.budget),
            _label(plan, prediction),
            f"{prediction.resident_share:.0%}",
            show_bytes(prediction.moved_bytes or None),
            show_seconds(prediction.seconds),
            show_seconds(prediction.limit_seconds),
            f"{prediction.to_limit:.2f}",
            show_seconds(prediction.stall_seconds if prediction.stall_seconds > 0 else None),
            _times(prediction.to_resident),
            f"{prediction.misses:.0f}" if prediction.misses else "-",
            style="bold" if prediction.budget in plan.asked else "",
        )
    console.print(table)
    for line in conclusions(plan):
        console.print(Text(line), soft_wrap=False)
    for note in notes:
        console.print(Text(note, style="dim"))


def _label(plan: Plan, prediction: Prediction) -> str:
    if prediction.budget == plan.smallest < plan.all:
        return "smallest"
    return "all" if prediction.budget >= plan.all else f"{prediction.budget / plan.all:.0%}"


def _times(factor: float) -> str:
    return "-" if math.isinf(factor) else f"{factor:.2f}" if factor < 100 else f"{factor:.0f}"


def conclusions(plan: Plan) -> Iterator[str]:
    """Yield what follows from the table, a sentence each."""
    for budget in plan.too_small:
        yield (
            f"{format_bytes(budget)} is too small: the largest group of weights takes "
            f"{format_bytes(plan.smallest)} ({plan.smallest} bytes), the smallest budget that works."
        )
    for prediction in plan.predictions:
        if prediction.budget in plan.asked:
            yield f"{format_bytes(prediction.budget)}: {_sentence(prediction)}"
    if plan.hidden_from <= plan.smallest:
        yield "Compute hides all copies at any budget that works."
    elif plan.hidden_from >= 0.99 * plan.all:
        yield f"Only a budget for all weights ({format_bytes(plan.all)}) hides all copies."
    else:
        yield f"From about {format_bytes(plan.hidden_from)} on, compute hides all copies."
    yield "Times and bytes are of one pass in the steady state. The budget is for weights, not activations."
    yield "No order of copies beats the limit: max(compute, copies of what the budget cannot hold)."
    yield "x all resident: relative to all weights on the device."


def _sentence(prediction: Prediction) -> str:
    if prediction.resident_share >= 1:
        return f"every weight is resident; {show_seconds(prediction.seconds)} a pass."
    if prediction.hidden:
        tail = "compute hides the copies"
    elif prediction.copy_seconds >= prediction.compute_seconds:
        tail = "bound by copies: more budget or a faster bus helps, more prefetch hardly does"
    else:
        tail = "compute is longer than the copies in all, but not everywhere: some groups arrive late"
    slower = prediction.to_resident
    than = "" if math.isinf(slower) else f", {_times(slower)} x all resident"
    moved, seconds = show_bytes(prediction.moved_bytes), show_seconds(prediction.seconds)
    share = f"{prediction.resident_share:.0%} of the weights resident"
    return f"{share}, {moved} moved, {seconds} a pass{than}; {tail}."


def as_json(plan: Plan, facts: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Return everything, for programs: bytes and seconds."""
    return {
        **facts,
        "bandwidth": plan.bandwidth,
        "latency": plan.latency,
        "prefetch": plan.prefetch,
        "weights": len(plan.weights),
        "weight_bytes": sum(weight.nbytes for weight in plan.weights),
        "smallest_budget": plan.smallest,
        "all_resident_budget": plan.all,
        "copies_hidden_from": plan.hidden_from,
        "asked": list(plan.asked),
        "too_small": list(plan.too_small),
        "budgets": [
            {
                **dataclasses.asdict(prediction),
                "to_limit": prediction.to_limit,
                # JSON has no infinity.
                "to_resident": None if math.isinf(prediction.to_resident) else prediction.to_resident,
            }
            for prediction in plan.predictions
        ],
        "notes": list(notes),
    }
