"""Summarises the layers of a model: shapes, parameters, bytes, and where each weight is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from dynswap_ext._swap.models import Installable, as_tree
from dynswap_ext._swap.state import is_scripted, modules_of, original_class
from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.option_names import check_option_names
from dynswap_ext._util.tables import Printable, facts_grid, plain_table, shape_text
from dynswap_ext.errors import ConfigError
from dynswap_ext.inspect._forward import Call, Shapes, isolated_forward, watched
from dynswap_ext.inspect._inputs import Inputs, Sizes
from dynswap_ext.inspect._model import WeightLocation, computes_on, root_of, walk, weights_of

#: The most places of weights that a row names; it only counts the others.
_NAMED: Final = 2
#: The text of the cell "trains", by the values that `trainable` has among the parameters of a row.
_TRAINS: Final[Mapping[tuple[bool, ...], str]] = {
    (): "",
    (False,): "no",
    (True,): "yes",
    (False, True): "in part",
}


@dataclass(frozen=True)
class Layer:
    """A module at one place of the tree."""

    #: The path of the place, such as "layers.0"; "" for the model itself.
    path: str
    #: The name of the module's class; for an installed module, that of its own class.
    class_name: str
    #: The number of modules above it: 0 for the model itself.
    depth: int
    #: Shapes of the inputs of the first call, one per tensor; None without a call.
    input_shapes: Shapes | None
    #: Shapes of the outputs of the first call, one per tensor; None without a call.
    output_shapes: Shapes | None
    #: How often the module was called in the forward; None if no forward was run, or if the module takes no
    #: hooks (TorchScript).
    calls: int | None
    #: The module's own weights, without those of its children.
    weights: tuple[WeightLocation, ...]
    #: Elements of all parameters in the module and its children, each counted once.
    parameters: int
    #: Elements of the parameters that require a gradient, each counted once.
    trainable_parameters: int
    #: Bytes of all parameters and buffers in the module and its children, each counted once.
    nbytes: int
    #: The path where the same module comes first; None if this is that place.
    same_as: str | None


@dataclass(frozen=True, repr=False)
class Summary(Printable):
    """The result of `summary`. ``print`` shows a table, rich a coloured one."""

    #: Every place of the tree, parents before children, in the order of definition.
    layers: tuple[Layer, ...]
    #: The largest `Layer.depth` in the printed table; None for all layers.
    depth: int | None
    #: The device on which the model computes.
    device: torch.device
    #: Elements of all parameters; shared ones count once.
    total_parameters: int
    #: Elements of the parameters that require a gradient; shared ones count once.
    trainable_parameters: int
    #: Bytes of the parameters as they are stored; shared ones count once.
    parameter_bytes: int
    #: Bytes of the buffers as they are stored; shared ones count once.
    buffer_bytes: int
    #: Bytes of parameters and buffers by the place where they live, in words such as "RAM" or
    #: "model.safetensors, streamed".
    bytes_by_place: Mapping[str, int]

    @property
    def weights(self) -> tuple[WeightLocation, ...]:
        """Every parameter and buffer, under each of its names if it is shared, in the order of the layers."""
        return tuple(weight for layer in self.layers if layer.same_as is None for weight in layer.weights)

    @property
    def frozen_parameters(self) -> int:
        """Elements of the parameters that require no gradient; shared ones count once."""
        return self.total_parameters - self.trainable_parameters

    def __repr__(self) -> str:
        name = self.layers[0].class_name
        return f"<Summary of {name}: {len(self.layers)} layers, {self.total_parameters:,} parameters>"

    def _parts(self) -> tuple[Any, ...]:
        rows = [
            self._row(index)
            for index, layer in enumerate(self.layers)
            if self.depth is None or layer.depth <= self.depth
        ]
        left_out = set() if self.frozen_parameters else {"trains"}
        if all(layer.calls is None for layer in self.layers):
            left_out.add("output")
        columns = [name for name in rows[0] if name not in left_out]
        cells = [[row[name] for name in columns] for row in rows]
        in_parameters, in_buffers = format_bytes(self.parameter_bytes), format_bytes(self.buffer_bytes)
        facts = [
            ("parameters", f"{self.total_parameters:,}"),
            ("trainable", f"{self.trainable_parameters:,}"),
            ("frozen", f"{self.frozen_parameters:,}"),
            ("bytes", f"{in_parameters} in parameters, {in_buffers} in buffers"),
            ("computes on", str(self.device)),
            *((place, format_bytes(size)) for place, size in self.bytes_by_place.items() if size),
        ]
        optional = [name for name in ("trains", "output", "lives") if name in columns]
        table = plain_table(columns, cells, right=("parameters", "bytes"), optional=optional)
        return table, facts_grid(facts)

    def _row(self, index: int) -> dict[str, str]:
        layer = self.layers[index]
        end = index + 1
        while end < len(self.layers) and self.layers[end].depth > layer.depth:
            end += 1
        under = self.layers[index:end]  # the layer, and all in it
        closed = len(under) == 1 or layer.depth == self.depth
        weights = [weight for part in (under if closed else under[:1]) for weight in part.weights]
        if layer.same_as is not None:  # its weights are listed at its first place
            weights = []
        last_name = f"{layer.path.rpartition('.')[2]}: " if layer.path else ""
        parameters, size = _amounts(layer, weights)
        places = _places(weights)
        more = [f"{len(places) - _NAMED} more"] if len(places) > _NAMED else []
        return {
            "layer": "  " * layer.depth + last_name + layer.class_name,
            "output": _output(layer, any(part.calls for part in under)),
            "parameters": parameters,
            "bytes": size,
            "trains": _TRAINS[tuple(sorted({weight.trainable for weight in weights if weight.is_parameter}))],
            "lives": "; ".join([*places[:_NAMED], *more]),
        }


def _places(weights: Sequence[WeightLocation]) -> list[str]:
    """Return the places where weights are; if there are several, each with its bytes, the largest first."""
    sizes: Counter[str] = Counter()
    for weight in {weight.tied_to or weight.name: weight for weight in weights}.values():
        if weight.shape is not None:
            sizes[weight.lives] += weight.nbytes
    if len(sizes) < 2:
        return list(sizes)
    return [f"{place} ({format_bytes(size)})" for place, size in sizes.most_common()]


def _output(layer: Layer, called: bool) -> str:
    """Return the cell of a layer's outputs. `called` tells if the layer, or one in it, was called."""
    if layer.same_as is not None or layer.calls is None:
        return ""
    if not layer.calls:
        return "" if called else "not called"
    text = ", ".join(map(shape_text, layer.output_shapes or ()))
    return f"{text} ({layer.calls} calls)" if layer.calls > 1 else text


def _amounts(layer: Layer, weights: Sequence[WeightLocation]) -> tuple[str, str]:
    """Return the cells "parameters" and "bytes" of a row."""
    if layer.same_as is not None:
        return f"(as {layer.same_as or 'the model'})", ""
    if not weights:
        return "", ""
    if any(weight.shape is None for weight in weights):
        return "not made yet", ""
    once = {weight.tied_to or weight.name: weight for weight in weights}.values()
    size = format_bytes(sum(weight.nbytes for weight in once))
    count = f"{sum(weight.elements for weight in once if weight.is_parameter):,}"
    if all(weight.tied_to for weight in weights):
        tied = ", ".join(sorted({str(weight.tied_to) for weight in weights}))
        return f"{count} (is {tied})", size
    return (count if any(weight.is_parameter for weight in once) else ""), size


@check_option_names
def summary(
    model: Installable,
    input_size: Sizes | None = None,
    *,
    input_data: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | Mapping[str, torch.dtype] | None = None,
    depth: int | None = 3,
) -> Summary:
    """Summarise the layers of a model, plain or installed, also of one on the meta device.

    If inputs are given, one forward is run in eval mode and without gradients to learn the shapes. Otherwise
    nothing is run and no weight is read. Random numbers, modes of modules and hooks are as before when this
    returns or raises. The statistics of an installed model count the forward.

    Parameters
    ----------
    model : torch.nn.Module, or a pipeline, list, tuple or dict of modules
        The model. Inputs can be given for a single module only. For a result of `torch.compile`, the model
        that was compiled is summarised.
    input_size : sequence of int, sequence of those, or mapping from names to those, optional
        Shapes of made-up inputs, batch dimension included: ``(1, 3, 224, 224)``; ``[(1, 8), (1, 8, 16)]`` for
        two positional arguments; ``{"tokens": (1, 8)}`` for keyword arguments. The inputs are made on the
        device where the model computes. They hold ones, or zeros for an integer dtype.
    input_data : optional
        Inputs of your own. A tuple or list has the positional arguments, a mapping has keyword arguments, and
        anything else is the only argument. They are passed on as they are, and not moved.
    kwargs : mapping, optional
        More keyword arguments for the forward.
    dtypes : torch.dtype, sequence or mapping of those, optional
        The dtype of all made-up inputs, or of each. Default: the dtype in which the model computes.
    depth : int or None
        The number of levels below the model that the printed table has; None for all. `Summary.layers` always
        has all of them.

    Returns
    -------
    Summary
        The figures. ``print`` shows a table.

    Raises
    ------
    ConfigError
        `model` is no module, both `input_size` and `input_data` are given, or another argument has a
        value that cannot be used.

    Notes
    -----
    Errors of the forward are passed on.

    The forward initialises lazy modules, as any first forward does; without it, their weights have no shape
    yet. Modules that TorchScript has compiled take no hooks, so their shapes are not shown. While hooks are
    on them, torch's transformer layers do not take their fused path, so their parts are shown.
    """
    root = root_of(as_tree(model))
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
        raise ConfigError(f"depth is {depth!r}; expected a number of levels, 0 for the model alone, or None")
    inputs = Inputs.of(root, input_size=input_size, input_data=input_data, kwargs=kwargs, dtypes=dtypes)
    if input_size is None and input_data is None and kwargs is None:
        return _describe(root, None, depth)
    with isolated_forward(root, evaluate=True), watched(walk(root)) as calls:
        inputs.run(root)
    return _describe(root, calls, depth)


def _describe(root: nn.Module, calls: Sequence[Call] | None, depth: int | None) -> Summary:
    nodes = walk(root)  # again after the forward, which gives lazy modules their weights
    own = weights_of(nodes)
    once = [weight for weights in own.values() for weight in weights if weight.tied_to is None]
    bytes_by_place: Counter[str] = Counter()
    for weight in once:
        bytes_by_place[weight.lives] += weight.nbytes
    times = Counter(call.path for call in calls or ())
    first = {call.path: call for call in reversed(calls or ())}
    layers = []
    for path, level, module, same_as in nodes:
        parts = modules_of(module)
        under = {weight.tied_to or weight.name: weight for part in parts for weight in own[id(part)]}.values()
        first_path = path if same_as is None else same_as
        call = first.get(first_path)
        layers.append(
            Layer(
                path=path,
                class_name=original_class(type(module)).__name__,
                depth=level,
                input_shapes=call.input_shapes if call else None,
                output_shapes=call.output_shapes if call else None,
                calls=None if calls is None or is_scripted(type(module)) else times[first_path],
                weights=tuple(own[id(module)]),
                parameters=sum(weight.elements for weight in under if weight.is_parameter),
                trainable_parameters=sum(weight.elements for weight in under if weight.trainable),
                nbytes=sum(weight.nbytes for weight in under),
                same_as=same_as,
            )
        )
    return Summary(
        layers=tuple(layers),
        depth=depth,
        device=computes_on(root),
        total_parameters=sum(weight.elements for weight in once if weight.is_parameter),
        trainable_parameters=sum(weight.elements for weight in once if weight.trainable),
        parameter_bytes=sum(weight.nbytes for weight in once if weight.is_parameter),
        buffer_bytes=sum(weight.nbytes for weight in once if not weight.is_parameter),
        bytes_by_place=dict(bytes_by_place),
    )
