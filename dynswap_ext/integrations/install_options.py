"""The options of `dynswap_ext.install` that integrations take, and their default budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynswap_ext import config
from dynswap_ext._util.memory import AUTO
from dynswap_ext._util.option_names import refuse_unknown


def install_options(
    function: str, given: Mapping[str, Any], *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the given options for `install`, with the budget "auto" if they lack both `budget` and `plan`.

    Raises a TypeError, which names `function`, for a name that is no option of `install`, or is in `without`.
    Values are not checked.
    """
    known = [name for name in config.OPTION_NAMES if name not in without]
    refuse_unknown(function, given, known)
    return dict(given) if {"budget", "plan"} & given.keys() else {"budget": AUTO, **given}
