"""The command ``dynswap show``: prints the contents of a checkpoint, and the budget that it needs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dynswap_ext._util.memory import exact_bytes
from dynswap_ext._util.tables import facts_grid, write
from dynswap_ext._util.units import parse_model_budget
from dynswap_ext.checkpoint import Summary, summary, verify
from dynswap_ext.checkpoint.summary import dtype_name


def add_to(commands: Any) -> None:
    """Add ``dynswap show`` to the commands of the parser."""
    show = commands.add_parser(
        "show",
        help="show the contents of a checkpoint, and the budget that it needs",
        description="Print a checkpoint's keys, shapes, dtypes, bytes and ties, its largest group of weights "
        "and the smallest budget. Reads headers and nothing else.",
    )
    show.set_defaults(command=_show)
    add = show.add_argument
    add("path", metavar="PATH", help="a file, an index, or a folder")
    add("--budget", metavar="SIZE", help="check a budget, such as 6GiB (exit status 1 if it is too small)")
    add("--share", help="the same as a share of the checkpoint: 25%% or 1/4")
    add("--all", action="store_true", help="a row for each tensor, also of repeated layers")
    add("--json", action="store_true", help="everything, for programs")
    add("--verify", action="store_true", help="read all, and compare the checksums that convert keeps")


def _show(options: argparse.Namespace) -> int:
    found = summary(options.path)
    budget = parse_model_budget(options.budget, options.share, found.total_bytes)
    verified = verify(options.path) if options.verify else None
    if options.json:
        print(json.dumps(_as_json(found, budget, verified), indent=2, default=str))
    else:
        _print(found, budget, verified, collapse=not options.all)
    return 1 if budget is not None and budget < found.smallest_budget else 0


def _as_json(found: Summary, budget: int | None, verified: int | None) -> dict[str, Any]:
    group = found.largest_group
    content = {
        **vars(found),
        "tensors": {
            name: {
                "dtype": dtype_name(entry),
                "shape": entry.shape,
                "bytes": entry.nbytes,
                "file": entry.file,
                "offset": entry.offset,
            }
            for name, entry in found.entries.items()
        },
        "largest_group": {"names": group.names, "bytes": group.nbytes} if group else None,
        "smallest_budget": found.smallest_budget,
        "smallest_budgets": {device: each.nbytes for device, each in found.largest_groups.items()},
    }
    del content["entries"], content["largest_groups"]
    if budget is not None:
        content["budget"] = {"bytes": budget, "works": budget >= found.smallest_budget}
    if verified is not None:
        content["verified_bytes"] = verified
    return content


def _print(found: Summary, budget: int | None, verified: int | None, *, collapse: bool) -> None:
    facts = found.facts()
    checksums = facts.pop("checksums")
    if budget is not None:
        facts["this budget"] = f"{exact_bytes(budget)} {_answer(found, budget)}"
    compared = None if verified is None else f"{exact_bytes(verified)} compared, and equal"
    facts["checksums"] = compared or checksums.replace("`verify`", "--verify")
    write(found.table(collapse=collapse), facts_grid(facts.items()))


def _answer(found: Summary, budget: int) -> str:
    if budget >= found.total_bytes:
        return "holds all of it: nothing is streamed after the first pass"
    if budget >= found.smallest_budget:
        return f"works: holds {budget / found.total_bytes:.0%} of the weights"
    return "is too small"
