"""``dynswap inspect``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynswap_ext.checkpoint import Summary

#: Ties, and files, that are listed before the others are only counted.
_LISTED = 10


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    inspect = commands.add_parser(
        "inspect",
        help="say what a checkpoint has in it, and what budget it needs",
        description="Print a checkpoint's keys, shapes, dtypes, bytes and ties, its largest group of weights "
        "and the smallest budget. Reads headers and nothing else.",
    )
    inspect.set_defaults(command=_inspect)
    add = inspect.add_argument
    add("path", metavar="PATH", help="a file, an index, or a folder")
    add("--budget", help="say whether it does: a size, or a share of the whole (exit status 1 if not)")
    add("--all", action="store_true", help="a row for each tensor, also of repeated layers")
    add("--json", action="store_true", help="everything, for programs")
    add("--verify", action="store_true", help="read all of it, and compare the checksums that convert keeps")


def _inspect(options: argparse.Namespace) -> int:
    from dynswap_ext.checkpoint import summary, verify
    from dynswap_ext.demo.units import parse_share

    found = summary(options.path)
    budget = parse_share(options.budget, found.total_bytes) if options.budget else None
    verified = verify(options.path) if options.verify else None
    if options.json:
        print(json.dumps(_as_json(found, budget, verified), indent=2))
    else:
        _print(found, budget, verified, collapse=not options.all)
    return 1 if budget is not None and budget < found.smallest_budget else 0


def _as_json(found: Summary, budget: int | None, verified: int | None) -> dict[str, Any]:
    from dynswap_ext.checkpoint.summary import dtype_name

    group = found.largest_group
    content: dict[str, Any] = {
        "path": str(found.path),
        "format": found.format,
        "files": [str(file) for file in found.files],
        "tensors": {
            name: {
                "dtype": dtype_name(entry),
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "file": str(entry.file),
                "offset": entry.offset,
            }
            for name, entry in found.entries.items()
        },
        "ties": [list(tie) for tie in found.ties],
        "objects": list(found.objects),
        "metadata": dict(found.metadata),
        "total_bytes": found.total_bytes,
        "bytes_by_dtype": dict(found.bytes_by_dtype),
        "largest_group": {"names": list(group.names), "bytes": group.nbytes} if group else None,
        "smallest_budget": found.smallest_budget,
        "checksums": found.checksums,
    }
    if budget is not None:
        content["budget"] = {"bytes": budget, "works": budget >= found.smallest_budget}
    if verified is not None:
        content["verified_bytes"] = verified
    return content


def _print(found: Summary, budget: int | None, verified: int | None, *, collapse: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dynswap_ext._memory import format_bytes
    from dynswap_ext.checkpoint.summary import rows

    table = Table()
    table.add_column("key", overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    for row in rows(found, collapse=collapse):
        shape = " x ".join(map(str, row.shape)) or "scalar"
        table.add_row(Text(row.pattern), str(len(row.names)), shape, row.dtype, format_bytes(row.nbytes))

    facts = Table.grid(padding=(0, 2))

    def fact(name: str, text: str) -> None:
        facts.add_row(Text(name, style="bold"), Text(text))

    fact("format", found.format)
    fact("files", _some([str(file) for file in found.files], "\n"))
    fact("tensors", f"{len(found.entries)}, {_both(found.total_bytes)}")
    fact("dtypes", ", ".join(f"{name} {format_bytes(size)}" for name, size in found.bytes_by_dtype.items()))
    if found.ties:
        fact("ties", _some([" = ".join(tie) for tie in found.ties], "\n"))
    if found.objects:
        fact("not tensors", _some(list(found.objects), ", "))
    if found.metadata:
        fact("metadata", _some([f"{name}: {text[:100]}" for name, text in found.metadata.items()], "\n"))
    if found.largest_group is not None:
        fact(
            "largest group",
            f"{_both(found.largest_group.nbytes)}: {_some([*found.largest_group.names], ', ')}",
        )
        fact("smallest budget", _both(found.smallest_budget))
    if budget is not None:
        fact("this budget", f"{_both(budget)} {_verdict(found, budget)}")
    checked = "none" if not found.checksums else "kept; --verify compares them"
    fact("checksums", checked if verified is None else f"{_both(verified)} compared, and equal")

    console = Console()
    console.print(table)
    console.print(facts)


def _verdict(found: Summary, budget: int) -> str:
    if budget >= found.total_bytes:
        return "holds all of it: nothing is streamed after the first pass"
    if budget >= found.smallest_budget:
        return f"does: {budget / found.total_bytes:.0%} of the weights"
    return "is too small"


def _both(size: int) -> str:
    from dynswap_ext._memory import format_bytes

    return f"{size} bytes" if size < 1024 else f"{format_bytes(size)} ({size} bytes)"


def _some(texts: list[str], between: str) -> str:
    more = [f"and {len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
    return between.join([*texts[:_LISTED], *more])
