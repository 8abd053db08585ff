"""The options of `dynswap_ext.install`, as integrations take them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from dynswap_ext import config
from dynswap_ext._util.memory import AUTO
from dynswap_ext._util.option_names import refuse_unknown


def install_options(
    function: str, given: Mapping[str, Any], *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return what `install` is to be given: the budget is "auto", unless one or a plan is given.

    Raises a TypeError of the function's for a name that is no option, or is one of `without`. Values are not
    looked at.
    """
    known = [name for name in inspect.signature(config.resolve).parameters if name not in without]
    refuse_unknown(function, given, known)
    return dict(given) if {"budget", "plan"} & given.keys() else {"budget": AUTO, **given}
