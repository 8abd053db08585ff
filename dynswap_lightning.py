"""What the entry point shows to Lightning, whose every `Trainer` imports it, also in programs without us.

So this is a module of its own: importing the package would load the extension there.
"""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """Return the callback that ``DYNSWAP_LIGHTNING`` asks for; without that variable, none."""
    if not os.environ.get("DYNSWAP_LIGHTNING"):
        return []
    from dynswap_ext.integrations.lightning import from_environment

    return list(from_environment())
