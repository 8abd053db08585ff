"""A plan as a table, in words, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynswap_ext._memory import format_bytes
from dynswap_ext.demo.units import show_bytes, show_seconds
from dynswap_ext.planning.predict import Plan, Prediction

__all__ = ["as_json", "conclusions", "show"]


def show(plan: Plan, facts: Mapping[str, str], notes: Sequence[str], console: Console) -> None:
    """The facts, the table, and what it says."""
    grid = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        grid.add_row(Text(name, style="bold"), Text(text))
    console.print(grid)
    console.print(_table(plan))
    for line in conclusions(plan):
        console.print(Text(line), soft_wrap=False)
    for note in notes:
        console.print(Text(note, style="dim"))


def _table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    titles = (
        *("budget", "of all", "resi-\ndent", "moved", "time", "limit"),
        *("x\nlimit", "stalls", "x all\nresident", "misses"),
    )
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for prediction in plan.predictions:
        table.add_row(
            format_bytes(prediction.budget),
            _label(plan, prediction),
            f"{prediction.resident_share:.0%}",
            show_bytes(prediction.moved_bytes) if prediction.moved_bytes else "-",
            show_seconds(prediction.seconds),
            show_seconds(prediction.limit_seconds),
            f"{prediction.to_limit:.2f}",
            show_seconds(prediction.stall_seconds) if prediction.stall_seconds > 0 else "-",
            _times(prediction.to_resident),
            f"{prediction.misses:.0f}" if prediction.misses else "-",
            style="bold" if prediction.budget in plan.asked else "",
        )
    return table


def _label(plan: Plan, prediction: Prediction) -> str:
    if prediction.budget == plan.smallest < plan.all:
        return "smallest"
    if prediction.budget >= plan.all:
        return "all"
    return f"{prediction.budget / plan.all:.0%}"


def _times(factor: float) -> str:
    return "-" if math.isinf(factor) else f"{factor:.2f}" if factor < 100 else f"{factor:.0f}"


def conclusions(plan: Plan) -> Iterator[str]:
    """What the table says, a sentence each."""
    for budget in plan.too_small:
        yield (
            f"{format_bytes(budget)} is too small: the largest group of weights takes "
            f"{format_bytes(plan.smallest)} ({plan.smallest} bytes), the smallest budget that works."
        )
    found = {prediction.budget: prediction for prediction in plan.predictions}
    for budget in plan.asked:
        yield f"{format_bytes(budget)}: {_sentence(found[budget])}"
    yield _hidden(plan)
    yield (
        "Times are of a pass in the steady state (time, limit, stalls and moved are a pass's); limit: "
        "max(compute, "
        "copies); x all resident: against all weights on the device. A budget is for weights: activations "
        "are "
        "beside it."
    )


def _sentence(prediction: Prediction) -> str:
    if prediction.resident_share >= 1:
        return f"every weight is resident; {show_seconds(prediction.seconds)} a pass."
    slower = prediction.to_resident
    if prediction.hidden:
        tail = "compute hides the copies"
    elif prediction.copy_seconds >= prediction.compute_seconds:
        tail = "bound by copies: more budget or a faster bus helps, more prefetch hardly does"
    else:
        tail = "compute is longer than the copies in all, but not everywhere: some groups arrive late"
    than = "" if math.isinf(slower) else f", {_times(slower)} x all resident"
    return (
        f"{prediction.resident_share:.0%} of the weights resident, {show_bytes(prediction.moved_bytes)} "
        f"moved, "
        f"{show_seconds(prediction.seconds)} a pass{than}; {tail}."
    )


def _hidden(plan: Plan) -> str:
    if plan.hidden_from <= plan.smallest:
        return "Compute hides all copies at any budget that works."
    if plan.hidden_from >= 0.99 * plan.all:
        return f"Copies are not hidden at any budget below all of the weights, {format_bytes(plan.all)}."
    return f"From about {format_bytes(plan.hidden_from)} on, compute hides all copies."


def as_json(plan: Plan, facts: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """Everything, for programs: bytes and seconds."""
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
                "budget": prediction.budget,
                "resident_share": prediction.resident_share,
                "resident_bytes": prediction.resident_bytes,
                "moved_bytes": prediction.moved_bytes,
                "seconds": prediction.seconds,
                "compute_seconds": prediction.compute_seconds,
                "copy_seconds": prediction.copy_seconds,
                "limit_seconds": prediction.limit_seconds,
                "to_limit": prediction.to_limit,
                "stall_seconds": prediction.stall_seconds,
                # JSON has no infinity.
                "to_resident": None if math.isinf(prediction.to_resident) else prediction.to_resident,
                "misses": prediction.misses,
                "groups": prediction.groups,
                "depth": prediction.depth,
            }
            for prediction in plan.predictions
        ],
        "notes": list(notes),
    }
