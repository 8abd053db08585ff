"""Rules that random programs leave out until a known bug is fixed.

Remove an entry with its fix: its rules and its small programs (test_found.py) run from then on.
DYNSWAP_PROGRAMS_ALSO=name,name (or `all`) runs them before.
"""

from __future__ import annotations

import os

NOT_YET: dict[str, str] = {
    "frozen swap": "swap_tensors of a resident's master that was frozen while installed is refused",
}


def waits(name: str | None) -> bool:
    """Return whether the rules of that name are left out."""
    also = os.environ.get("DYNSWAP_PROGRAMS_ALSO", "").split(",")
    return name in NOT_YET and name not in also and "all" not in also
