"""Inputs made up from their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dynswap_ext._state import modules_of, session_of
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._hooks import computes_on
from dynswap_ext.inspect._tree import entries

__all__ = ["made_up"]

_FORMS = (
    "expected a shape with the batch dimension such as (1, 3, 224, 224), a list of shapes for several "
    "positional inputs, or a mapping from names to shapes for keyword ones"
)


def made_up(root: nn.Module, input_size: Any, dtypes: Any) -> tuple[torch.Tensor, ...] | dict[str, Any]:
    """Positional or keyword inputs of the given shapes, where the model computes.

    Ones, as a forward may divide by what it gets; zeros for integers, as those may be indices.

    Raises
    ------
    ConfigError
        `input_size` or `dtypes` cannot be read, or they do not fit together.
    """
    if isinstance(input_size, Mapping):
        sizes = {name: _size(size, input_size) for name, size in input_size.items()}
        wanted = _each(root, dtypes, list(sizes))
        return {name: _tensor(root, size, wanted[name]) for name, size in sizes.items()}
    if not isinstance(input_size, Sequence) or isinstance(input_size, str) or not input_size:
        raise ConfigError(f"input_size is {input_size!r}; {_FORMS}")
    one = isinstance(input_size[0], int)
    shapes = [_size(input_size, input_size)] if one else [_size(size, input_size) for size in input_size]
    wanted = _each(root, dtypes, list(range(len(shapes))))
    return tuple(_tensor(root, size, wanted[index]) for index, size in enumerate(shapes))


def _size(size: Any, given: Any) -> tuple[int, ...]:
    fine = isinstance(size, Sequence) and not isinstance(size, str)
    if not fine or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in size):
        raise ConfigError(f"input_size is {given!r}; {_FORMS}")
    return tuple(size)


def _each(root: nn.Module, dtypes: Any, names: list[Any]) -> dict[Any, torch.dtype]:
    if dtypes is None:
        return dict.fromkeys(names, _computes_in(root))
    if isinstance(dtypes, torch.dtype):
        return dict.fromkeys(names, dtypes)
    found: dict[Any, Any]
    if isinstance(dtypes, Mapping):
        found = {**dict.fromkeys(names, _computes_in(root)), **dtypes}
    elif isinstance(dtypes, Sequence) and not isinstance(dtypes, str) and len(dtypes) == len(names):
        found = dict(zip(names, dtypes, strict=True))
    else:
        found = {}
    if set(found) != set(names) or not all(isinstance(dtype, torch.dtype) for dtype in found.values()):
        raise ConfigError(
            f"dtypes is {dtypes!r}; expected a torch.dtype, or one for each of the {len(names)} inputs that "
            "input_size has, as a list or by name"
        )
    return found


def _computes_in(root: nn.Module) -> torch.dtype:
    for module in modules_of(root):
        session = session_of(module)
        if session is not None and session.dtype is not None:
            cast_into: torch.dtype = session.dtype
            return cast_into
        for _, master, is_parameter in entries(module):
            if is_parameter and master.is_floating_point():
                return master.dtype
    return torch.get_default_dtype()


def _tensor(root: nn.Module, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    value = 1 if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(size, value, dtype=dtype, device=computes_on(root))
