"""``dynswap show``: the contents of a checkpoint."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dynswap_ext._util.listing import listed
from dynswap_ext._util.memory import exact_bytes, format_bytes
from dynswap_ext._util.name_patterns import key_of, pattern_of
from dynswap_ext._util.tables import facts_grid, plain_table, write
from dynswap_ext._util.units import parse_model_budget
from dynswap_ext.checkpoint import Summary, summary, verify
from dynswap_ext.checkpoint.summary import dtype_name


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
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
    alike: dict[object, list[str]] = {}  # entries with one name but for its numbers, one dtype and one shape
    for name, entry in found.entries.items():
        key = (key_of(name), dtype_name(entry), entry.shape) if collapse else name
        alike.setdefault(key, []).append(name)
    cells = []
    for names in alike.values():
        entry = found.entries[names[0]]
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        size = format_bytes(sum(found.entries[name].nbytes for name in names))
        cells.append((pattern_of(names), str(len(names)), shape, dtype_name(entry), size))
    group = found.largest_group
    facts: dict[str, str | None] = {
        "format": found.format,
        "files": listed(list(map(str, found.files)), 10, lines=True),
        "tensors": f"{len(found.entries)}, {exact_bytes(found.total_bytes)}",
        "dtypes": ", ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes_by_dtype.items()),
        "ties": listed([" = ".join(tie) for tie in found.ties], 10, lines=True),
        "not tensors": listed(found.objects, 10),
        "metadata": listed(
            [f"{name}: {text[:100]}" for name, text in found.metadata.items()], 10, lines=True
        ),
        "largest group": f"{exact_bytes(group.nbytes)}: {listed(group.names, 10)}" if group else None,
        "smallest budget": _smallest(found),
        "this budget": None if budget is None else f"{exact_bytes(budget)} {_answer(found, budget)}",
        "checksums": "kept; --verify compares them" if found.checksums else "none",
    }
    if verified is not None:
        facts["checksums"] = f"{exact_bytes(verified)} compared, and equal"
    write(
        plain_table(("key", "tensors", "shape", "dtype", "bytes"), cells, right=("tensors", "bytes")),
        facts_grid([(name, text) for name, text in facts.items() if text]),
    )


def _smallest(found: Summary) -> str:
    """Name the smallest budgets, one line a device; one for all if they are equal."""
    sizes = {device: group.nbytes for device, group in found.largest_groups.items()}
    kind = "" if found.provider == "native" else ", in pure Python (`dynswap info` says why)"
    if len(sizes) == 2 and len(set(sizes.values())) == 1:
        return exact_bytes(sizes["cpu"]) + kind
    where = {"cpu": "on the CPU", "accelerator": "on an accelerator"}
    return "\n".join(f"{exact_bytes(size)} {where[device]}{kind}" for device, size in sizes.items())


def _answer(found: Summary, budget: int) -> str:
    if budget >= found.total_bytes:
        return "holds all of it: nothing is streamed after the first pass"
    if budget >= found.smallest_budget:
        return f"works: holds {budget / found.total_bytes:.0%} of the weights"
    return "is too small"
