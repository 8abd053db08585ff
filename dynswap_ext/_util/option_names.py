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
    """Return the end of an error message that suggests the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(str(given), known, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def check_option_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with more helpful TypeErrors, and with the same signature.

    For an unknown option the error names the nearest option (as Python's does from 3.13 on) or lists all. For
    an option that is passed by position, it shows how to pass it by name.
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
    """Raise a TypeError if an option is unknown. It names the nearest known option, or lists them all."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}"
                + (did_you_mean(name, known) or f"; expected one of {', '.join(known)}")
            )


def _named(given: object, options: Collection[str]) -> str:
    """Return the end of an error message for an option that was passed by position.

    It shows the option passed by name if its value tells which one it is, else it lists the options.
    """
    name = "dtype" if isinstance(given, torch.dtype) else "budget" if is_amount(given) else "device"
    if name in options and isinstance(given, (str, torch.device, torch.dtype)):
        return f"; write {name}={given!r}"
    return f"; options are given by name: {', '.join(options)}" if options else ""


def is_amount(given: object) -> bool:
    """Return whether a text can only be an amount of memory: a number with a unit."""
    return isinstance(given, str) and _SIZE.fullmatch(given) is not None
