"""The options of `dynswap_ext.install`, as integrations take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dynswap_ext import config
from dynswap_ext._util.memory import AUTO
from dynswap_ext._util.option_names import refuse_unknown


def install_options(
    function: str, given: Mapping[str, Any], *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options for `install`: those given, and the budget "auto" if neither it nor a plan is given.

    A name that is no option of `install`, or is one of `without`, raises a TypeError that names `function`.
    Values are not checked.
    """
    known = [name for name in config.OPTION_NAMES if name not in without]
    refuse_unknown(function, given, known)
    return dict(given) if {"budget", "plan"} & given.keys() else {"budget": AUTO, **given}
