"""The layers of a model as data, and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dynswap_ext._util.memory import format_bytes
from dynswap_ext._util.tables import Printable, facts_grid, plain_table, shape_text
from dynswap_ext.inspect._where import WeightLocation

__all__ = ["Layer", "Shapes", "Summary"]

Shapes = tuple[tuple[int, ...], ...]
#: Places that a row names before it only counts them.
_NAMED: Final = 2


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
    weights: tuple[WeightLocation, ...]
    #: Elements of all parameters under it, each counted once.
    parameters: int
    trainable_parameters: int
    #: Bytes of all parameters and buffers under it, each counted once.
    nbytes: int
    #: The path where the same module comes first, if it is registered more than once. The
    #: fields above are the same there.
    same_as: str | None


@dataclass(frozen=True, repr=False)
class Summary(Printable):
    """The result of `summary`. ``print`` it; rich prints it in colour."""

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
    def weights(self) -> tuple[WeightLocation, ...]:
        """Every parameter and buffer under every name, in the order of the layers."""
        return tuple(weight for layer in self.layers if layer.same_as is None for weight in layer.weights)

    @property
    def frozen_parameters(self) -> int:
        """Elements of parameters that require no gradient."""
        return self.total_parameters - self.trainable_parameters

    def __repr__(self) -> str:
        name = self.layers[0].class_name
        return f"<Summary of {name}: {len(self.layers)} layers, {self.total_parameters:,} parameters>"

    def _parts(self) -> tuple[Any, ...]:
        return _table(self), facts_grid(_totals(self))


def _table(found: Summary) -> Any:
    ran = any(layer.calls is not None for layer in found.layers)
    shown = [i for i, layer in enumerate(found.layers) if found.depth is None or layer.depth <= found.depth]
    frozen = found.frozen_parameters > 0
    columns = [
        "layer",
        *(["output"] if ran else []),
        "parameters",
        "bytes",
        *(["trains"] if frozen else []),
        "lives",
    ]
    rows = []
    for index in shown:
        layer = found.layers[index]
        under = _under(found, index)
        closed = len(under) == 1 or layer.depth == found.depth
        weights = _weights(under if closed else under[:1])
        rows.append(
            [
                _name(layer),
                *([_output(layer, under)] if ran else []),
                *_amounts(layer, weights),
                *([_trains(weights)] if frozen else []),
                _lives(weights),
            ]
        )
    return plain_table(columns, rows, right=("parameters", "bytes"))


def _under(found: Summary, index: int) -> tuple[Layer, ...]:
    """Return a layer and those below it, which follow it."""
    end = index + 1
    while end < len(found.layers) and found.layers[end].depth > found.layers[index].depth:
        end += 1
    return found.layers[index:end]


def _weights(under: tuple[Layer, ...]) -> list[WeightLocation]:
    """Return none for a module that comes again: they are listed where it comes first."""
    if under[0].same_as is not None:
        return []
    return [weight for part in under for weight in part.weights]


def _name(layer: Layer) -> str:
    last = layer.path.rpartition(".")[2]
    text = f"{last}: {layer.class_name}" if layer.path else layer.class_name
    return "  " * layer.depth + text


def _output(layer: Layer, under: tuple[Layer, ...]) -> str:
    if layer.same_as is not None:
        return ""
    if not layer.calls:
        return "" if any(part.calls for part in under) or layer.calls is None else "not called"
    if layer.output_shapes is None:
        return ""
    text = ", ".join(shape_text(sizes) for sizes in layer.output_shapes)
    return f"{text} ({layer.calls} calls)" if layer.calls > 1 else text


def _amounts(layer: Layer, weights: list[WeightLocation]) -> tuple[str, str]:
    if layer.same_as is not None:
        return f"(as {layer.same_as or 'the model'})", ""
    if not weights:
        return "", ""
    once = {weight.tied_to or weight.name: weight for weight in weights}.values()
    if any(weight.shape is None for weight in once):
        return "not made yet", ""
    tied = ", ".join(sorted({weight.tied_to for weight in weights if weight.tied_to}))
    count = sum(weight.elements for weight in once if weight.is_parameter)
    size = format_bytes(sum(weight.nbytes for weight in once))
    if tied and all(weight.tied_to for weight in weights):
        return f"{count:,} (is {tied})", size
    return (f"{count:,}" if any(weight.is_parameter for weight in once) else ""), size


def _trains(weights: list[WeightLocation]) -> str:
    answers = {weight.trainable for weight in weights if weight.is_parameter}
    if not answers:
        return ""
    return "in part" if len(answers) == 2 else "yes" if answers.pop() else "no"


def _lives(weights: list[WeightLocation]) -> str:
    places = list(dict.fromkeys(weight.lives for weight in weights if weight.shape is not None))
    more = [f"{len(places) - _NAMED} more"] if len(places) > _NAMED else []
    return "; ".join([*places[:_NAMED], *more])


def _totals(found: Summary) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{found.total_parameters:,}"),
        ("trainable", f"{found.trainable_parameters:,}"),
        ("frozen", f"{found.frozen_parameters:,}"),
        (
            "bytes",
            f"{format_bytes(found.parameter_bytes)} in parameters, "
            f"{format_bytes(found.buffer_bytes)} in buffers",
        ),
        ("computes on", str(found.device)),
    ]
    rows += [(place, format_bytes(size)) for place, size in found.bytes_by_place.items() if size]
    return rows
