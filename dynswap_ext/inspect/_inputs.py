"""The inputs of a forward that is run to inspect a model: those that are given, or made up from shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.state import modules_of, session_of
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._forward import tensors_in
from dynswap_ext.inspect._model import computes_on, entries

#: One shape, a sequence of shapes for positional inputs, or a mapping from names to shapes.
Sizes = Sequence[Any] | Mapping[str, Sequence[int]]

_FORMS: Final = (
    "expected a shape with the batch dimension such as (1, 3, 224, 224), a list of shapes for several "
    "positional inputs, or a mapping from names to shapes for keyword ones"
)
_EXAMPLE: Final = (
    "The inputs were made up by dynswap_ext.inspect from input_size. Token ids and other indices "
    "need dtypes=torch.long; where made-up values do not do, give input_data."
)


@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    #: Whether the inputs are made up from shapes, so that they may be the cause of an error.
    made_up: bool

    @classmethod
    def of(
        cls,
        root: nn.Module,
        *,
        input_size: Any,
        input_data: Any,
        kwargs: Mapping[str, Any] | None,
        dtypes: Any,
    ) -> Inputs:
        """Return the inputs for options of `summary` or `memory_profile`: given, or made up from shapes."""
        if input_size is None:
            if dtypes is not None:
                raise ConfigError("dtypes is for made-up inputs, and there is no input_size")
            return cls(*arguments(input_data, kwargs, "input_data"), made_up=False)
        if input_data is not None:
            raise ConfigError(
                "both input_size and input_data are given; one of them says what the inputs are"
            )
        made = _example_inputs(root, input_size, dtypes)
        return cls(*arguments(made, kwargs, "input_size"), made_up=True)

    def run(self, root: nn.Module) -> None:
        """Call the model with these inputs. An error over made-up inputs gets a note that says so."""
        try:
            root(*self.args, **self.kwargs)
        except Exception as error:
            if self.made_up and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_EXAMPLE)
            raise


def arguments(
    given: Any, kwargs: Mapping[str, Any] | None, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from the inputs of a call, which were given as option `name`.

    A list or tuple has the positional arguments, a mapping has keyword arguments, None means no argument, and
    anything else is the only argument.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigError(f"kwargs is a {type(kwargs).__name__}; expected a mapping of argument names")
    keywords = dict(kwargs or {})
    if given is None:
        return (), keywords
    if not isinstance(given, Mapping):
        return (tuple(given) if isinstance(given, (list, tuple)) else (given,)), keywords
    try:
        return (), dict(**given, **keywords)
    except TypeError as error:
        raise ConfigError(
            f"{name} is a mapping, so its entries are keyword arguments ({error}); for a model that takes a "
            f"mapping as its one argument, give {name}=(mapping,)"
        ) from error


def _example_inputs(
    root: nn.Module, input_size: Any, dtypes: Any
) -> tuple[torch.Tensor, ...] | dict[Any, Any]:
    """Make positional or keyword inputs of the given shapes, on the device where the model computes.

    They hold ones, because a forward may divide by them, or zeros for integer dtypes, which may be indices.
    """
    if next(tensors_in(input_size), None) is not None:
        raise ConfigError("input_size has tensors; expected shapes. Inputs of your own are input_data=...")
    if isinstance(input_size, Mapping):
        sizes: dict[Any, Any] = dict(input_size)
    elif isinstance(input_size, Sequence) and not isinstance(input_size, str) and input_size:
        sizes = dict(enumerate([input_size] if _is_shape(input_size) else input_size))
    else:
        raise ConfigError(f"input_size is {input_size!r}; {_FORMS}")
    if not all(map(_is_shape, sizes.values())):
        raise ConfigError(f"input_size is {input_size!r}; {_FORMS}")
    default = _computes_in(root)
    given: dict[Any, Any] = dict.fromkeys(sizes, default if dtypes is None else dtypes)
    if isinstance(dtypes, Mapping):
        given = {**dict.fromkeys(sizes, default), **dtypes}
    elif isinstance(dtypes, Sequence):
        given = dict(zip(sizes, dtypes, strict=False)) if len(dtypes) == len(sizes) else {}
    if given.keys() != sizes.keys() or not all(isinstance(dtype, torch.dtype) for dtype in given.values()):
        raise ConfigError(
            f"dtypes is {dtypes!r}; expected a torch.dtype, or one for each of the {len(sizes)} inputs that "
            "input_size has, as a list or by name"
        )
    made = {}
    for name, dtype in given.items():
        value = 1 if dtype.is_floating_point or dtype.is_complex else 0
        made[name] = torch.full(tuple(sizes[name]), value, dtype=dtype, device=computes_on(root))
    return made if isinstance(input_size, Mapping) else tuple(made.values())


def _is_shape(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in value
    )


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
