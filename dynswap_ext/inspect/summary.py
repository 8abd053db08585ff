"""The layers of a model: shapes, parameters, bytes, and where each weight lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.state import is_scripted, modules_of, session_of
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._hooks import arguments, computes_on, isolated_forward, watching
from dynswap_ext.inspect._layers import Layer, Shapes, Summary
from dynswap_ext.inspect._tensors import shapes_in
from dynswap_ext.inspect._tree import Node, class_name, entries, root_of, walk
from dynswap_ext.inspect._where import WeightLocation, weights_of

__all__ = ["Layer", "Summary", "summary"]

_FORMS: Final = (
    "expected a shape with the batch dimension such as (1, 3, 224, 224), a list of shapes for several "
    "positional inputs, or a mapping from names to shapes for keyword ones"
)
_EXAMPLE: Final = (
    "The inputs were made up by dynswap_ext.inspect.summary from input_size. Token ids and other indices "
    "need dtypes=torch.long; where made-up values do not do, give input_data."
)


def summary(
    model: nn.Module,
    input_size: Sequence[Any] | Mapping[str, Sequence[int]] | None = None,
    *,
    input_data: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | Mapping[str, torch.dtype] | None = None,
    depth: int | None = 3,
) -> Summary:
    """Summarise a model, plain or installed, also one on the meta device.

    With an input, one forward is run in eval mode and without gradients to learn the shapes; without one,
    nothing is run and nothing is read. Random numbers, each module's mode and every hook are as before when
    this returns or raises. An installed model counts that forward as any other.

    Parameters
    ----------
    model : torch.nn.Module
        One that `torch.compile` made is looked into as the model that it was made from.
    input_size : sequence of int, sequence of those, or mapping from names to those, optional
        Shapes of made-up inputs, batch dimension included: ``(1, 3, 224, 224)``; ``[(1, 8), (1, 8, 16)]`` for
        two positional ones; ``{"tokens": (1, 8)}`` for keywords. They hold ones, zeros if the dtype is an
        integer one, where the model computes.
    input_data : optional
        Inputs of your own in their place. A tuple or list: the positional arguments; a mapping: keyword
        arguments; anything else: the only argument. They are passed on as they are, and not moved.
    kwargs : mapping, optional
        More keyword arguments for the forward.
    dtypes : torch.dtype, sequence or mapping of those, optional
        Of the made-up inputs, all or each. Default: the dtype in which the model computes.
    depth : int or None
        How deep the printed table goes; the root is at 0. None: all of it. The data is always whole.

    Returns
    -------
    Summary
        Data; ``print`` shows a table.

    Raises
    ------
    ConfigError
        `model` is no module, both `input_size` and `input_data` are given, or one of the others has a value
        that cannot be used.

    Notes
    -----
    Whatever the forward raises is passed on.

    Lazy modules are made real by the forward, as by any first one; without an input their weights have no
    shape yet. Modules that TorchScript has compiled take no hooks, and show no shapes. Hooks keep torch from
    the fused path of its transformer layers, so that their parts are seen.
    """
    root = root_of(model)
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise ConfigError(f"depth is {depth!r}; expected a number of levels, 0 for the model alone, or None")
    if input_size is not None and input_data is not None:
        raise ConfigError("both input_size and input_data are given; one of them says what the inputs are")
    if input_size is None and dtypes is not None:
        raise ConfigError("dtypes is for made-up inputs, and there is no input_size")
    if input_size is None and input_data is None and kwargs is None:
        return _describe(root, None, depth)
    if input_size is None:
        args, keywords = arguments(input_data, kwargs, "input_data")
    else:
        args, keywords = arguments(_example_inputs(root, input_size, dtypes), kwargs, "input_size")
    observed: dict[int, _Observed] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observed.setdefault(id(module), _Observed(shapes_in((args, kwargs)))).calls += 1

    def leave(module: nn.Module, output: Any) -> None:
        known = observed[id(module)]
        if known.output_shapes is None:
            known.output_shapes = shapes_in(output)

    modules = [node.module for node in walk(root) if node.same_as is None]
    with isolated_forward(root, evaluate=True), watching(modules, enter, leave):
        try:
            root(*args, **keywords)
        except Exception as error:
            if input_size is not None and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_EXAMPLE)
            raise
    return _describe(root, observed, depth)


@dataclass
class _Observed:
    """What a forward has shown of a module."""

    input_shapes: Shapes
    output_shapes: Shapes | None = None
    calls: int = 0


def _describe(root: nn.Module, observed: Mapping[int, _Observed] | None, depth: int | None) -> Summary:
    nodes = walk(root)  # after the forward: lazy modules have become others
    own = weights_of(nodes)
    under = _weights_under(nodes, own)
    once = [weight for weights in own.values() for weight in weights if weight.tied_to is None]
    bytes_by_place: dict[str, int] = {}
    for weight in once:
        bytes_by_place[weight.lives] = bytes_by_place.get(weight.lives, 0) + weight.nbytes
    return Summary(
        layers=tuple(_layer(node, own[id(node.module)], under[id(node.module)], observed) for node in nodes),
        depth=depth,
        device=computes_on(root),
        total_parameters=sum(weight.elements for weight in once if weight.is_parameter),
        trainable_parameters=sum(weight.elements for weight in once if weight.trainable),
        parameter_bytes=sum(weight.nbytes for weight in once if weight.is_parameter),
        buffer_bytes=sum(weight.nbytes for weight in once if not weight.is_parameter),
        bytes_by_place=bytes_by_place,
    )


def _weights_under(
    nodes: Sequence[Node], own: Mapping[int, tuple[WeightLocation, ...]]
) -> dict[int, dict[str, WeightLocation]]:
    """Return the weights under each module, each once, by the name under which it comes first."""
    children = {id(node.module): node.children for node in nodes if node.same_as is None}
    found: dict[int, dict[str, WeightLocation]] = {}

    def under(module: nn.Module) -> dict[str, WeightLocation]:
        known = found.get(id(module))
        if known is None:
            known = found[id(module)] = {}  # at once: a module may be below itself
            known.update({weight.tied_to or weight.name: weight for weight in own[id(module)]})
            for child in children[id(module)]:
                known.update(under(child.module))
        return known

    under(nodes[0].module)
    return found


def _layer(
    node: Node,
    own: tuple[WeightLocation, ...],
    under: Mapping[str, WeightLocation],
    observed: Mapping[int, _Observed] | None,
) -> Layer:
    known = None if observed is None else observed.get(id(node.module))
    hooked = observed is not None and not is_scripted(type(node.module))
    return Layer(
        path=node.path,
        class_name=class_name(node.module),
        depth=node.depth,
        input_shapes=None if known is None else known.input_shapes,
        output_shapes=None if known is None else known.output_shapes,
        calls=(0 if known is None else known.calls) if hooked else None,
        weights=own,
        parameters=sum(weight.elements for weight in under.values() if weight.is_parameter),
        trainable_parameters=sum(weight.elements for weight in under.values() if weight.trainable),
        nbytes=sum(weight.nbytes for weight in under.values()),
        same_as=node.same_as,
    )


# ---- inputs that are made up -------------------------------------------------------------------------------


def _example_inputs(
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
