"""Writes lists of names for messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 5, *, lines: bool = False) -> str:
    """Join the first `most` names by commas, or by line breaks, and say how many more there are."""
    more = f"and {len(names) - most:,} more" if len(names) > most else ""
    if lines:
        return "\n".join([*names[:most], *filter(None, [more])])
    return ", ".join(names[:most]) + (more and f" {more}")
