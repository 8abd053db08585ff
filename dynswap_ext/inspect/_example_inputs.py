"""Example inputs from their shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.state import modules_of, session_of
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._hooks import computes_on
from dynswap_ext.inspect._tree import entries

__all__ = ["example_inputs"]

_FORMS: Final = (
    "expected a shape with the batch dimension such as (1, 3, 224, 224), a list of shapes for several "
    "positional inputs, or a mapping from names to shapes for keyword ones"
)


def example_inputs(
    root: nn.Module, input_size: Any, dtypes: Any
) -> tuple[torch.Tensor, ...] | dict[str, Any]:
    """Make positional or keyword inputs of the given shapes, where the model computes.

    Ones, as a forward may divide by what it gets; zeros for integers, as those may be indices.

    Raises
    ------
    ConfigError
        `input_size` or `dtypes` cannot be read, or they do not fit together.
    """
    if isinstance(input_size, Mapping):
        sizes = dict(input_size)
    elif isinstance(input_size, Sequence) and not isinstance(input_size, str) and input_size:
        sizes = dict(enumerate([input_size] if isinstance(input_size[0], int) else input_size))
    else:
        raise ConfigError(f"input_size is {input_size!r}; {_FORMS}")
    for size in sizes.values():
        fine = isinstance(size, Sequence) and not isinstance(size, str)
        if not fine or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in size):
            raise ConfigError(f"input_size is {input_size!r}; {_FORMS}")
    made = {}
    for name, dtype in _dtypes(root, dtypes, list(sizes)).items():
        value = 1 if dtype.is_floating_point or dtype.is_complex else 0
        made[name] = torch.full(tuple(sizes[name]), value, dtype=dtype, device=computes_on(root))
    return made if isinstance(input_size, Mapping) else tuple(made.values())


def _dtypes(root: nn.Module, given: Any, names: list[Any]) -> dict[Any, torch.dtype]:
    """Return the dtype of each input."""
    found: dict[Any, Any] = dict.fromkeys(names, given)
    if given is None:
        return dict.fromkeys(names, _computes_in(root))
    if isinstance(given, Mapping):
        found = {**dict.fromkeys(names, _computes_in(root)), **given}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        found = dict(zip(names, given, strict=False)) if len(given) == len(names) else {}
    if set(found) != set(names) or not all(isinstance(dtype, torch.dtype) for dtype in found.values()):
        raise ConfigError(
            f"dtypes is {given!r}; expected a torch.dtype, or one for each of the {len(names)} inputs that "
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
