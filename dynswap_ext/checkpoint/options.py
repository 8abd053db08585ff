"""Options that `load` and `convert` have in common: other names for entries, and another dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from dynswap_ext._util.units import parse_dtype
from dynswap_ext.checkpoint.reader import Entry
from dynswap_ext.errors import ConfigError

#: A function that returns the new name of an entry, or None to leave it out; or rules. A rule is a regular
#: expression and its replacement, as in `re.sub`. All rules are applied to each name, one after the other.
Rename: TypeAlias = Callable[[str], "str | None"] | Mapping[str, str] | Sequence[tuple[str, str]]


def check_dtype(dtype: Any) -> None:
    """Raise ConfigError unless the option `dtype` is a floating dtype or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        expected = "a floating dtype such as torch.bfloat16, or None"
        if isinstance(dtype, str):
            with suppress(ConfigError):
                expected = str(parse_dtype(dtype))
        raise ConfigError(f"dtype is {dtype!r}; expected {expected}")


def cast_to(dtype: torch.dtype | None, entry: Entry) -> torch.dtype:
    """Return the dtype of an entry after the cast to `dtype`, which leaves integers and blocks alone."""
    casts = entry.dtype.is_floating_point and entry.is_exact
    return dtype if dtype is not None and casts else entry.dtype


def renamed(names: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """Apply `rename`, and return the old name of each new one.

    Raises ConfigError for rules that cannot be used, and if two entries get one name.
    """
    function = rename if callable(rename) else _apply_rules(rename or ())
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


def _apply_rules(given: Mapping[str, str] | Sequence[tuple[str, str]]) -> Callable[[str], str]:
    try:
        rules = [
            (re.compile(pattern), replacement)
            for pattern, replacement in (given.items() if isinstance(given, Mapping) else given)
        ]
        for pattern, replacement in rules:
            pattern.sub(replacement, "")  # raises if the replacement names a group that does not exist
    except (re.error, TypeError, ValueError) as error:
        raise ConfigError(
            f"rename is {given!r}: {error}; expected a function, or rules as in "
            r"{r'^module\.': ''} or [(r'layers\.(\d+)', r'blocks.\1')]"
        ) from error

    def apply(name: str) -> str:
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        return name

    return apply
