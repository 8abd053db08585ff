"""Suggests names for misspelt options of a call, and for misspelt values that are chosen by name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def nearest(given: object, known: Collection[str]) -> str | None:
    """Return the name that was probably meant; None if none is near."""
    return next(iter(difflib.get_close_matches(str(given), known, n=1)), None)


def check_option_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make calls with an unknown option raise a TypeError that names the nearest option, or lists them all.

    Python itself names the nearest from 3.14 on. The function keeps its signature.
    """
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                    f"{_meant(name, known)}"
                )
        return function(*args, **kwargs)

    return checked


def _meant(given: str, known: Collection[str]) -> str:
    near = nearest(given, known)
    return f". Did you mean {near!r}?" if near else f"; expected one of {', '.join(known)}"
