"""Other names for a checkpoint's entries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from dynswap_ext.errors import ConfigError

#: A function from a checkpoint's name to the model's, None leaving the entry out; or rules, each a regular
#: expression and its replacement as in `re.sub`, applied in order, each to what the one before it made.
Rename: TypeAlias = Callable[[str], "str | None"] | Mapping[str, str] | Sequence[tuple[str, str]]


def renamed(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """The new names, each with the old one.

    Raises
    ------
    ConfigError
        A rule is no regular expression, a name is no text, or two entries get one name. Names them.
    """
    function = _function(rename)
    old: dict[str, str] = {}
    for name in names:
        new = function(name)
        if new is None:
            continue
        if not isinstance(new, str) or not new:
            raise ConfigError(f"rename made {new!r} of {name!r}; expected a name, or None to leave it out")
        if new in old:
            raise ConfigError(
                f"rename gives one name, {new!r}, to two entries, {old[new]!r} and {name!r}; return None for "
                "the one to leave out, or make the rule narrower"
            )
        old[new] = name
    return old


def _function(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    try:
        rules = [
            (re.compile(pattern), replacement)
            for pattern, replacement in (rename.items() if isinstance(rename, Mapping) else rename)
        ]
        for pattern, replacement in rules:
            pattern.sub(replacement, "")  # raises for a group that the pattern has not got
    except (re.error, TypeError, ValueError) as error:
        raise ConfigError(
            f"rename is {rename!r}: {error}; expected a function, or rules as in "
            r"{r'^module\.': ''} or [(r'layers\.(\d+)', r'blocks.\1')]"
        ) from error

    def apply(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return apply
