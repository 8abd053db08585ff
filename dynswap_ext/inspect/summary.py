"""The layers of a model: shapes, parameters, bytes, and where each weight lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynswap_ext._state import is_scripted
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect import _text
from dynswap_ext.inspect._hooks import arguments, computes_on, evaluating, one_call, watching
from dynswap_ext.inspect._made_up import made_up
from dynswap_ext.inspect._tensors import shapes_in
from dynswap_ext.inspect._tree import Node, class_name, root_of, walk
from dynswap_ext.inspect._where import Surveyor, Weight

__all__ = ["Layer", "Summary", "summary"]

_MADE_UP = (
    "The inputs were made up by dynswap_ext.inspect.summary from input_size. Token ids and other indices "
    "need dtypes=torch.long; where made-up values do not do, give input_data."
)

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layer:
    """A module at one place of the tree."""

    #: Dotted, "" for the model itself.
    path: str
    class_name: str
    #: 0 for the model itself.
    depth: int
    #: Of the first call, one per tensor. None without a call.
    input_shapes: Shapes | None
    output_shapes: Shapes | None
    #: How often it was called in the forward; None if none was run, or if it takes no hooks (TorchScript).
    calls: int | None
    #: Its own, without those of its children.
    weights: tuple[Weight, ...]
    #: Elements of all parameters under it, each counted once.
    parameters: int
    trainable_parameters: int
    #: Bytes of all parameters and buffers under it, each counted once.
    nbytes: int
    #: The path where the same module comes first, if it is registered more than once. What stands in the
    #: columns above is the same there.
    same_as: str | None


@dataclass(frozen=True, repr=False)
class Summary:
    """What `summary` found. ``print`` it; rich prints it in colour."""

    #: Every place of the tree, parents before children, in the order of definition.
    layers: tuple[Layer, ...]
    #: How deep the printed table goes; None for all of it.
    depth: int | None
    #: Where the model computes.
    device: torch.device
    #: Elements; what is shared counts once.
    total_parameters: int
    trainable_parameters: int
    #: Bytes of the masters as they are stored; what is shared counts once.
    parameter_bytes: int
    buffer_bytes: int
    #: The same bytes by where they live, in words such as "RAM" or "model.safetensors, streamed".
    bytes_by_place: Mapping[str, int]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter and buffer under every name, in the order of the layers."""
        return tuple(weight for layer in self.layers if layer.same_as is None for weight in layer.weights)

    @property
    def frozen_parameters(self) -> int:
        """Elements of parameters that require no gradient."""
        return self.total_parameters - self.trainable_parameters

    def __repr__(self) -> str:
        name = self.layers[0].class_name
        return f"<Summary of {name}: {len(self.layers)} layers, {self.total_parameters:,} parameters>"

    def __str__(self) -> str:
        return _text.as_text(*self._parts())

    def __rich_console__(self, console: Any, options: Any) -> Iterable[Any]:
        """The table and the totals, for rich."""
        yield from self._parts()

    def _parts(self) -> tuple[Any, Any]:
        from dynswap_ext.inspect._summary_table import parts

        return parts(self)


def summary(
    model: nn.Module,
    input_size: Sequence[Any] | Mapping[str, Sequence[int]] | None = None,
    *,
    input_data: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | Mapping[str, torch.dtype] | None = None,
    depth: int | None = 3,
) -> Summary:
    """Look at a model, plain or installed, also one on the meta device.

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

    Whatever the forward raises is passed on.

    Notes
    -----
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
        args, keywords = arguments(made_up(root, input_size, dtypes), kwargs, "input_size")
    seen: dict[int, _Seen] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = seen.setdefault(id(module), _Seen(shapes_in((args, kwargs))))
        known.calls += 1

    def leave(module: nn.Module, output: Any) -> None:
        known = seen[id(module)]
        if known.output_shapes is None:
            known.output_shapes = shapes_in(output)

    with ExitStack() as ways_back:
        ways_back.enter_context(one_call(root))
        ways_back.enter_context(evaluating(root))
        ways_back.enter_context(watching((n.module for n in walk(root) if n.same_as is None), enter, leave))
        try:
            root(*args, **keywords)
        except Exception as error:
            if input_size is not None and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_MADE_UP)
            raise
    return _describe(root, seen, depth)


class _Seen:
    """What a forward has shown of a module."""

    def __init__(self, input_shapes: Shapes) -> None:
        self.calls = 0
        self.input_shapes = input_shapes
        self.output_shapes: Shapes | None = None


def _describe(root: nn.Module, seen: Mapping[int, _Seen] | None, depth: int | None) -> Summary:
    surveyor = Surveyor()
    nodes = walk(root)  # anew: lazy modules have become others
    own = {id(n.module): surveyor.describe(n.module, n.path) for n in nodes if n.same_as is None}
    masters = _Totals(nodes, own)
    layers = tuple(_layer(node, own[id(node.module)], masters, seen) for node in nodes)
    once = [weight for weights in own.values() for weight in weights if weight.tied_to is None]
    by_place: dict[str, int] = {}
    for weight in once:
        by_place[weight.lives] = by_place.get(weight.lives, 0) + weight.nbytes
    return Summary(
        layers=layers,
        depth=depth,
        device=computes_on(root),
        total_parameters=sum(weight.elements for weight in once if weight.is_parameter),
        trainable_parameters=sum(weight.elements for weight in once if weight.trainable),
        parameter_bytes=sum(weight.nbytes for weight in once if weight.is_parameter),
        buffer_bytes=sum(weight.nbytes for weight in once if not weight.is_parameter),
        bytes_by_place=by_place,
    )


class _Totals:
    """The weights under each module, each once."""

    def __init__(self, nodes: Sequence[Node], own: Mapping[int, tuple[Weight, ...]]) -> None:
        self._own = own
        self._children = {
            id(node.module): [child.module for child in node.children]
            for node in nodes
            if node.same_as is None
        }
        self._under: dict[int, dict[str, Weight]] = {}

    def under(self, module: nn.Module) -> dict[str, Weight]:
        """By the name under which each comes first."""
        known = self._under.get(id(module))
        if known is None:
            known = self._under[id(module)] = {}  # at once: a module may be below itself
            for weight in self._own[id(module)]:
                known[weight.tied_to or weight.name] = weight
            for child in self._children[id(module)]:
                known.update(self.under(child))
        return known


def _layer(node: Node, own: tuple[Weight, ...], masters: _Totals, seen: Mapping[int, _Seen] | None) -> Layer:
    known = None if seen is None else seen.get(id(node.module))
    hooked = seen is not None and not is_scripted(type(node.module))
    under = masters.under(node.module).values()
    return Layer(
        path=node.path,
        class_name=class_name(node.module),
        depth=node.depth,
        input_shapes=None if known is None else known.input_shapes,
        output_shapes=None if known is None else known.output_shapes,
        calls=(0 if known is None else known.calls) if hooked else None,
        weights=own,
        parameters=sum(weight.elements for weight in under if weight.is_parameter),
        trainable_parameters=sum(weight.elements for weight in under if weight.trainable),
        nbytes=sum(weight.nbytes for weight in under),
        same_as=node.same_as,
    )
