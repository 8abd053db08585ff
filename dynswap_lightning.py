"""The entry point for Lightning. Every `Trainer` imports it, also in programs that do not use this package.

It is no part of `dynswap_ext`, because importing that would load the extension into all these programs.
"""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """Return the callback that installs each Trainer's module; none unless ``DYNSWAP_LIGHTNING`` is set."""
    if not os.environ.get("DYNSWAP_LIGHTNING"):
        return []
    from dynswap_ext.integrations.lightning import from_environment

    return list(from_environment())
