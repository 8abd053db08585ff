"""Suggests names for misspelt options of a call, and for misspelt values that are chosen by name."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Final, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


_BY_NAME: Final = inspect.Parameter.KEYWORD_ONLY
_SIZE: Final = re.compile(r"\s*[\d.]+\s*([kmgt]i?b?|b|%)\s*", re.IGNORECASE)


def did_you_mean(given: object, known: Collection[str]) -> str:
    """Return the end of an error that names what was probably meant; nothing if no name is near."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def check_option_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make calls with an unknown option raise a TypeError that names the nearest option, or lists them all.

    Python itself names the nearest from 3.14 on. An option that is given without its name raises one that
    writes it with its name. The function keeps its signature.
    """
    signature = inspect.signature(function)
    known = tuple(signature.parameters)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    unnamed = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds) - kinds.count(_BY_NAME)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                refuse_unknown(function.__qualname__, kwargs, known)
        if unnamed is not None and len(args) > unnamed:
            raise TypeError(
                f"{function.__qualname__}() takes {', '.join(known[:unnamed])} without a name, and got "
                f"{args[unnamed]!r} too{_named(args[unnamed], known[unnamed:])}"
            )
        return function(*args, **kwargs)

    return checked


def refuse_unknown(function: str, options: Collection[str], known: Collection[str]) -> None:
    """Raise a TypeError that names the nearest option, or lists them all, if one is not known."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}"
                + (did_you_mean(name, known) or f"; expected one of {', '.join(known)}")
            )


def _named(given: object, options: Collection[str]) -> str:
    """Return the end of an error for an option without its name: written with it, where the value tells."""
    name = "dtype" if isinstance(given, torch.dtype) else "budget" if is_amount(given) else "device"
    if name in options and isinstance(given, (str, torch.device, torch.dtype)):
        return f"; write {name}={given!r}"
    return f"; options are given by name: {', '.join(options)}" if options else ""


def is_amount(given: object) -> bool:
    """Return whether a text can only be an amount of memory: a number with a unit."""
    return isinstance(given, str) and _SIZE.fullmatch(given) is not None
